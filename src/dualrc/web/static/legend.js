// Legend of the colors of matches and of the certainty map.

import { element } from "./dom.js";
import { INLIER, OUTLIER, scaleGradient } from "./draw.js";
import { state, watch } from "./state.js";

function scale(name) {
  const row = element("div", "legend-row");
  const bar = element("span", "legend-scale");
  bar.style.backgroundImage = scaleGradient();
  bar.setAttribute("aria-hidden", "true");
  row.append(element("span", "legend-name", name), element("span", "", "0"), bar, element("span", "", "1"));
  return row;
}

function swatch(name, color) {
  const entry = element("span", "legend-entry");
  const dot = element("span", "legend-dot");
  dot.style.backgroundColor = color;
  entry.append(dot, name);
  return entry;
}

function inliers() {
  const row = element("div", "legend-row");
  row.append(swatch("inlier", INLIER), swatch("outlier", OUTLIER));
  return row;
}

/** Explain the colors that are shown; position needs no explanation. */
export function startLegend(box) {
  watch("show", () => {
    const { color, certainty, lines, dots } = state.show;
    const rows = [];
    if (color === "score" && (lines || dots)) rows.push(scale("Score"));
    if (color === "inlier" && (lines || dots)) rows.push(inliers());
    if (certainty) rows.push(scale("Certainty"));
    box.hidden = !rows.length;
    box.replaceChildren(...rows);
  });
}
