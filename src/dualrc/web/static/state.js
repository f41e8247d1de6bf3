// What the pair view shows. Parts change it with `change` and learn of changes with `watch`.

export const state = {
  phase: "empty", // empty, uploading, matching, ready, failed
  opening: false, // a stored pair or an example is being fetched
  images: [null, null], // {loaded: LoadedImage, id, width, height, name}
  result: null,
  estimate: null,
  homography: null, // an estimate of kind homography, for alignment; may be the same as `estimate`
  residuals: null,
  warps: { "01": null, "10": null },
  mode: "matches",
  align: "warp",
  amount: 50,
  show: { lines: true, dots: true, certainty: false, color: "position", epipolar: true },
  filter: { minScore: 0.5, count: 300, spread: true, thresholdPx: 3, inliersOnly: false },
  visible: [], // indices of the matches that are shown
  hover: null, // {image: 0 or 1, x, y, other: {x, y, certainty} or null, how}
  kept: [], // {x0, y0, x1, y1, certainty}
  linked: true,
  times: {},
  frames: [], // milliseconds that drawing the pointer's marks took, the latest last
  marks: { lenses: [], line: null }, // what was drawn for the pointer
};

const watchers = new Map();

/** Call `run` when one of the topics changes. */
export function watch(topics, run) {
  for (const topic of topics.split(" ")) {
    if (!watchers.has(topic)) watchers.set(topic, []);
    watchers.get(topic).push(run);
  }
}

/** Set fields and tell who watches them. */
export function change(patch) {
  Object.assign(state, patch);
  const calls = new Set(Object.keys(patch).flatMap((topic) => watchers.get(topic) ?? []));
  for (const run of calls) run();
}

/** A copy for tests and for the console: plain values only. */
export function snapshot(viewers, api) {
  const { phase, mode, align, amount, show, filter, hover, kept, linked, times, frames, marks, estimate } = state;
  return structuredClone({
    phase, mode, align, amount, show, filter, hover, kept, linked, times, frames, marks,
    images: state.images.map((image) => image && { id: image.id, name: image.name, width: image.width, height: image.height }),
    pair: state.result?.pair ?? null,
    count: state.result?.count ?? 0,
    seconds: state.result?.seconds ?? null,
    visible: state.visible.length,
    minVisibleScore: state.visible.reduce((least, k) => Math.min(least, state.result.scores[k]), 1),
    inliers: inlierCount(),
    estimate: estimate && { kind: estimate.kind, matrix: estimate.matrix },
    warps: Object.fromEntries(Object.entries(state.warps).map(([way, warp]) => [way, warp !== null])),
    views: viewers.map((viewer) => ({ ...viewer.view, size: viewer.size })),
    requests: api.requests,
  });
}

/** Matches within the inlier threshold, among all. */
export function inlierCount() {
  if (!state.residuals) return null;
  return state.residuals.reduce((sum, error) => sum + (error <= state.filter.thresholdPx), 0);
}
