// Sources of images: file dialog, camera, drag and drop, and clipboard.

import { hasDialog, photograph } from "./camera.js";
import { fail } from "./messages.js";

// Browsers know no type for some of these.
const IMAGE = /\.(avif|bmp|gif|heic|heif|hif|jpe?g|jp2|j2k|png|p[gpbn]m|tiff?|webp)$/i;

export function isImage(file) {
  return file.type.startsWith("image/") || IMAGE.test(file.name);
}

/** Set up the slots of the empty page; take(slot or null, files) receives the files of the user. */
export function startInputs(take) {
  for (const slot of document.querySelectorAll(".slot")) showSlot(slot, null, take);
  startDrop(take);
  addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])].filter(isImage);
    if (!files.length) return;
    event.preventDefault();
    take(null, files);
  });
}

/** Return a button that opens a file dialog, or the camera if `capture` names the photograph, and its input. */
export function chooser(label, icon, take, { capture = "", name = label, className = "button" } = {}) {
  const input = document.createElement("input");
  input.type = "file";
  input.accept = capture ? "image/*" : "image/*,.heic,.heif,.tif,.tiff,.ppm";
  input.hidden = true;
  input.multiple = !capture;
  if (capture) input.setAttribute("capture", "environment");
  input.setAttribute("aria-label", name);
  const button = document.createElement("button");
  button.type = "button";
  button.className = className;
  button.innerHTML = `<svg class="icon" aria-hidden="true"><use href="#${icon}"/></svg>`;
  if (className === "button") button.append(label);
  else button.setAttribute("aria-label", name);
  if (name !== label && className === "button") button.setAttribute("aria-label", name);
  button.addEventListener("click", async () => {
    if (!capture || !hasDialog()) return input.click();
    try {
      const file = await photograph(capture);
      if (file) take([file]);
    } catch (error) {
      fail(error);
    }
  });
  input.addEventListener("change", () => {
    if (input.files.length) take([...input.files]);
    input.value = "";
  });
  return [button, input];
}

/** Fill a slot with its image, or with controls to choose one. */
export function showSlot(slot, image, take) {
  const number = Number(slot.dataset.slot);
  slot.classList.toggle("filled", image !== null);
  slot.replaceChildren();
  const give = (files) => take(number, files);
  if (image) {
    const canvas = document.createElement("canvas");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `Image ${number}: ${image.name}`);
    [canvas.width, canvas.height] = [720, Math.round((720 * image.height) / image.width)];
    canvas.getContext("2d").drawImage(image.level(720 / image.width).bitmap, 0, 0, canvas.width, canvas.height);
    const name = document.createElement("div");
    name.className = "slot-name";
    const text = document.createElement("span");
    text.textContent = image.name;
    name.append(text, ...chooser("Replace", "i-image", give, { name: `Replace image ${number}`, className: "icon-button" }));
    slot.append(canvas, name);
    return;
  }
  slot.innerHTML = '<svg class="icon big-icon" aria-hidden="true"><use href="#i-image"/></svg>';
  const title = document.createElement("p");
  title.className = "slot-title";
  title.textContent = number === 0 ? "First image" : "Second image";
  const row = document.createElement("div");
  row.className = "row";
  row.append(...chooser("Choose a file", "i-image", give, { name: `Choose image ${number}` }),
    ...chooser("Photograph", "i-camera", give, { capture: `photograph-${number}.jpg`, name: `Photograph image ${number}` }));
  slot.append(title, row);
}

/** Return the dropped files, including those in dropped folders. */
async function dropped(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  if (!entries.some((entry) => entry.isDirectory)) return [...transfer.files];
  const files = [];
  const walk = async (entry) => {
    if (entry.isFile) files.push(await new Promise((done, no) => entry.file(done, no)));
    else {
      const reader = entry.createReader();
      for (;;) {
        const part = await new Promise((done, no) => reader.readEntries(done, no));
        if (!part.length) break;
        for (const child of part) await walk(child);
      }
    }
  };
  for (const entry of entries) await walk(entry);
  return files.sort((a, b) => a.name.localeCompare(b.name));
}

function startDrop(take) {
  // Files can be dropped anywhere on the folder view.
  const target = (event) => document.querySelector("#view-folder:not([hidden]) .folder-drop") ?? event.target.closest?.(".slot, .pane");
  const unmark = () => document.querySelectorAll(".over, .drop-here").forEach((element) => element.classList.remove("over", "drop-here"));
  addEventListener("dragover", (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    unmark();
    const element = target(event);
    element?.classList.add(element.classList.contains("pane") ? "drop-here" : "over");
  });
  addEventListener("dragleave", (event) => { if (!event.relatedTarget) unmark(); });
  addEventListener("drop", async (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    unmark();
    const element = target(event), place = element?.dataset.slot ?? element?.dataset.pane;
    const files = await dropped(event.dataTransfer);
    if (files.length) take(place === "0" || place === "1" ? Number(place) : null, files);
  });
}
