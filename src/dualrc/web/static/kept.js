// List of kept points, and the readout of the pointer position.

import { copy } from "./download.js";
import { percent } from "./draw.js";
import { announce, say } from "./messages.js";
import { change, state, watch } from "./state.js";

const byId = (id) => document.getElementById(id);
const at = (x, y) => `${x.toFixed(1)}, ${y.toFixed(1)}`;

function row(point, n) {
  const item = document.createElement("li");
  const number = document.createElement("span");
  number.className = "number";
  number.textContent = n + 1;
  const places = document.createElement("span");
  places.textContent = `(${at(point.x0, point.y0)}) → (${at(point.x1, point.y1)})`;
  const certainty = document.createElement("span");
  certainty.className = "muted";
  certainty.textContent = percent(point.certainty);
  const remove = document.createElement("button");
  remove.type = "button";
  remove.className = "icon-button";
  remove.setAttribute("aria-label", `Remove point ${n + 1}`);
  remove.innerHTML = '<svg class="icon" aria-hidden="true"><use href="#i-close"/></svg>';
  remove.addEventListener("click", () => change({ kept: state.kept.filter((other) => other !== point) }));
  item.append(number, places, certainty, remove);
  return item;
}

function showReadout() {
  const { hover, warps } = state;
  const line = byId("readout");
  if (state.mode !== "matches") line.textContent = "";
  else if (!hover) line.textContent = state.result ? "Point at a place in one image to find it in the other." : "";
  else if (hover.other) {
    const there = `image ${1 - hover.image} (${at(hover.other.x, hover.other.y)})`;
    line.textContent = `Image ${hover.image} (${at(hover.x, hover.y)}) → ${there}, ${percent(hover.other.certainty)} certain`;
  } else {
    const loading = state.result && !warps[hover.image === 0 ? "01" : "10"];
    line.textContent = `Image ${hover.image} (${at(hover.x, hover.y)}): ${loading ? "the dense warp is being computed" : "not found in the other image"}`;
  }
  // Announcing every mouse movement would be too much for screen readers.
  if (hover?.how === "key") announce(line.textContent);
}

export function startKept(stage) {
  byId("kept-copy").addEventListener("click", () => {
    const rows = state.kept.map((p) => [p.x0, p.y0, p.x1, p.y1].map((v) => v.toFixed(2)).concat(p.certainty.toFixed(3)).join(","));
    copy(["x0,y0,x1,y1,certainty", ...rows].join("\n"), `${rows.length} point${rows.length === 1 ? "" : "s"}`);
  });
  byId("kept-clear").addEventListener("click", () => change({ kept: [] }));
  stage.element.addEventListener("unknown", () => { if (state.result) say("This point was not found in the other image, so it is not kept."); });
  watch("kept", () => {
    byId("kept").replaceChildren(...state.kept.map(row));
    byId("kept-empty").hidden = state.kept.length > 0;
    byId("kept-copy").disabled = byId("kept-clear").disabled = !state.kept.length;
    if (state.kept.length) announce(`${state.kept.length} point${state.kept.length === 1 ? "" : "s"} kept`);
  });
  watch("hover warps result mode", showReadout);
}
