// Downloads, the current view as PNG, and text to copy.

import { fail, failResult, say } from "./messages.js";
import { commands, state, watch } from "./state.js";

const ENDINGS = { npz: "npz", csv: "csv", json: "json", colmap: "db", png: "png" };

function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 30_000);
}

function stem(name) {
  return (name ?? "image").replace(/\.[^.]+$/, "").replace(/[^\w-]+/g, "_").slice(0, 60) || "image";
}

/** Return the content of the stage without the pointer marks. */
function picture(stage) {
  const ratio = devicePixelRatio;
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [stage.overlay.width, stage.overlay.height];
  const ctx = canvas.getContext("2d");
  ctx.fillStyle = getComputedStyle(stage.element).backgroundColor;
  ctx.fillRect(0, 0, canvas.width, canvas.height);
  for (const pane of stage.element.querySelectorAll(".pane:not([hidden])")) {
    const box = [pane.offsetLeft, pane.offsetTop, pane.clientWidth, pane.clientHeight].map((value) => value * ratio);
    ctx.drawImage(pane.querySelector("canvas"), ...box);
  }
  ctx.drawImage(stage.overlay, 0, 0);
  ctx.drawImage(stage.pins, 0, 0);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

/** Copy text. Browsers allow the clipboard API on local addresses and over HTTPS only, so there is a fallback. */
export async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    if (!copied) return fail(new Error("The browser does not allow copying; select the text and copy it manually."));
  }
  say(`Copied ${what}.`);
}

export function startDownloads(api, stage) {
  document.getElementById("downloads").addEventListener("click", async (event) => {
    const format = event.target.dataset.format;
    if (!format || !state.result) return;
    const name = `${stem(state.images[0].name)}-${stem(state.images[1].name)}.${ENDINGS[format]}`;
    event.target.disabled = true;
    try {
      const query = new URLSearchParams({ format, ...(state.estimate?.matrix && { estimate: state.estimate.kind, ...state.estimate.settings }) });
      save(format === "png" ? await picture(stage) : await api.blob(`v1/pairs/${state.result.pair}?${query}`), name);
    } catch (error) {
      failResult(error, () => event.target.click());
    } finally {
      event.target.disabled = !state.result;
    }
  });
  watch("result", () => {
    for (const button of document.querySelectorAll("[data-format], [data-copy]")) button.disabled = !state.result;
  });
  for (const button of document.querySelectorAll("[data-copy]")) {
    const kind = button.dataset.copy;
    button.addEventListener("click", () => copy(commands()?.[kind] ?? "", kind === "shell" ? "the shell command" : "the Python code"));
  }
}
