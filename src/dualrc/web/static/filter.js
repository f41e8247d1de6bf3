// Selection of the visible matches by score, number and inlier threshold, without requests to the service.

import { residuals } from "./geometry.js";
import { change, inlierCount, state, watch } from "./state.js";

const CELLS = 16;
const byId = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en-US");
let orders = null;

/** Return two orders of the matches: best first, and best of each grid cell first. */
function makeOrders({ scores, points0, size0 }) {
  const best = Uint32Array.from(scores.keys()).sort((a, b) => scores[b] - scores[a]);
  const taken = new Uint32Array(CELLS * CELLS);
  const rank = new Uint32Array(scores.length);
  for (const k of best) {
    const [x, y] = points0[k];
    const column = Math.min(Math.floor(((x + 0.5) / size0[0]) * CELLS), CELLS - 1);
    const row = Math.min(Math.floor(((y + 0.5) / size0[1]) * CELLS), CELLS - 1);
    rank[k] = taken[row * CELLS + column]++;
  }
  const spread = Uint32Array.from(best).sort((a, b) => rank[a] - rank[b] || scores[b] - scores[a]);
  return { best, spread };
}

/** Update the visible matches. */
export function refilter() {
  const { result, filter, residuals: errors } = state;
  const visible = [];
  if (result && orders) {
    for (const k of filter.spread ? orders.spread : orders.best) {
      if (visible.length >= filter.count) break;
      if (result.scores[k] < filter.minScore) continue;
      if (filter.inliersOnly && errors && !(errors[k] <= filter.thresholdPx)) continue;
      visible.push(k);
    }
  }
  change({ visible });
}

// The count slider is logarithmic, to cover both few and many matches.
const countOf = (value, total) => (total < 2 ? total : Math.round(Math.exp(Math.log(10) + value * (Math.log(Math.max(total, 11)) - Math.log(10)))));
const sliderOf = (count, total) => (Math.log(Math.max(count, 10)) - Math.log(10)) / (Math.log(Math.max(total, 11)) - Math.log(10));

function setFilter(patch) {
  Object.assign(state.filter, patch);
  change({ filter: state.filter });
}

/** Reset the filter for a new result. */
export function takeResult(result) {
  orders = makeOrders(result);
  const good = result.scores.reduce((sum, score) => sum + (score >= 0.5), 0);
  // If few matches have a high score, show all, so that the image is not empty.
  setFilter({ minScore: good >= 30 ? 0.5 : 0, count: Math.min(result.count, innerWidth < 700 ? 150 : 300) });
}

function showControls() {
  const { filter, result, visible, estimate } = state;
  const total = result?.count ?? 0;
  byId("min-score").value = filter.minScore;
  byId("min-score-value").textContent = filter.minScore.toFixed(2);
  byId("count").value = sliderOf(filter.count, total);
  byId("count-value").textContent = result ? number.format(Math.min(filter.count, total)) : "";
  byId("spread").checked = filter.spread;
  byId("threshold").value = Math.log10(filter.thresholdPx);
  byId("threshold-value").textContent = `${filter.thresholdPx.toPrecision(2)} px`;
  byId("inliers-only").checked = filter.inliersOnly;
  byId("match-count").textContent = number.format(total);
  byId("shown-count").textContent = `${number.format(visible.length)} shown`;
  if (estimate) {
    const inliers = inlierCount();
    byId("inlier-count").textContent = estimate.matrix
      ? `${number.format(inliers)} inliers, ${total ? Math.round((100 * inliers) / total) : 0} % of all matches`
      : "No model fits these matches.";
  }
}

export function startFilter() {
  byId("min-score").addEventListener("input", (event) => setFilter({ minScore: Number(event.target.value) }));
  byId("count").addEventListener("input", (event) => setFilter({ count: countOf(Number(event.target.value), state.result?.count ?? 0) }));
  byId("spread").addEventListener("change", (event) => setFilter({ spread: event.target.checked }));
  byId("threshold").addEventListener("input", (event) => setFilter({ thresholdPx: Number((10 ** Number(event.target.value)).toPrecision(3)) }));
  byId("inliers-only").addEventListener("change", (event) => setFilter({ inliersOnly: event.target.checked }));
  watch("estimate", () => {
    const { estimate, result } = state;
    change({ residuals: estimate?.matrix && result ? residuals(estimate, result.points0, result.points1) : null });
  });
  watch("filter residuals result", refilter);
  watch("visible", showControls);
}
