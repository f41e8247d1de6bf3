// Panel that selects and shows a homography, fundamental or essential matrix.

import { announce, failResult } from "./messages.js";
import { change, state, watch } from "./state.js";

const byId = (id) => document.getElementById(id);

const format = (value) => (Math.abs(value) >= 0.01 && Math.abs(value) < 1e5 ? value.toPrecision(5) : value === 0 ? "0" : value.toExponential(2));
const show = (matrix) => matrix.map((row) => row.map((value) => format(value).padStart(10)).join(" ")).join("\n");

/** Let the service fit a model to the matches of the pair. */
async function estimate(api, kind, settings) {
  return api.json("POST", `v1/pairs/${state.result.pair}/estimate`, { kind, ...settings });
}

export function startGeometry(api) {
  const kind = byId("kind");
  const choose = async (settings) => {
    if (!kind.value || !state.result) return change({ estimate: null });
    const pair = state.result.pair;
    byId("re-estimate").disabled = true;
    try {
      const made = await estimate(api, kind.value, settings);
      if (state.result?.pair !== pair || made.kind !== kind.value) return;
      change({ estimate: { ...made, settings } });
      announce(byId("inlier-count").textContent);
    } catch (error) {
      failResult(error, () => choose(settings));
    } finally {
      byId("re-estimate").disabled = false;
    }
  };
  kind.addEventListener("change", async () => {
    await choose({ threshold_px: state.filter.thresholdPx });
    if (state.estimate?.matrix) setColor("inlier");
  });
  byId("re-estimate").addEventListener("click", () => choose({ threshold_px: state.filter.thresholdPx, min_score: state.filter.minScore }));
  byId("epipolar").addEventListener("change", (event) => change({ show: { ...state.show, epipolar: event.target.checked } }));
  for (const name of ["lines", "dots", "certainty"]) {
    byId(`show-${name}`).addEventListener("change", (event) => change({ show: { ...state.show, [name]: event.target.checked } }));
  }
  byId("color-by").addEventListener("change", (event) => setColor(event.target.value));
  watch("estimate", showEstimate);
  watch("show", () => {
    for (const name of ["lines", "dots", "certainty"]) byId(`show-${name}`).checked = state.show[name];
    byId("color-by").value = state.show.color;
  });
}

function setColor(color) {
  change({ show: { ...state.show, color } });
}

function showEstimate() {
  const made = state.estimate;
  byId("kind").value = made?.kind ?? "";
  byId("geometry-details").hidden = !made;
  byId("color-by").querySelector('[value="inlier"]').disabled = !made?.matrix;
  if (!made) {
    if (state.show.color === "inlier") setColor("position");
    state.filter.inliersOnly = false;
    return;
  }
  byId("matrix").hidden = !made.matrix;
  if (made.matrix) byId("matrix").textContent = show(made.matrix);
  byId("epipolar-field").hidden = !made.fundamental;
  byId("geometry-warning").hidden = !made.warnings?.length;
  byId("geometry-warning").textContent = made.warnings?.join(" ") ?? "";
}

/** Return a homography for alignment: the current one, or a newly fitted one. */
export async function homography(api) {
  if (state.estimate?.kind === "homography") return state.estimate.matrix;
  if (state.homography?.pair !== state.result.pair) {
    const made = await estimate(api, "homography", { threshold_px: 3 });
    state.homography = { pair: state.result.pair, matrix: made.matrix };
  }
  return state.homography.matrix;
}
