// State of the pair view. Modules change it with `change` and observe it with `watch`.

export const state = {
  // One of empty, uploading, matching, ready, failed.
  phase: "empty",
  // Whether a stored pair or an example is being fetched.
  opening: false,
  // Each image is {loaded: LoadedImage, id, width, height, name}. `renew` gives it to the service again.
  images: [null, null],
  result: null,
  estimate: null,
  // Estimate of kind homography, for alignment; can be the same as `estimate`.
  homography: null,
  residuals: null,
  warps: { "01": null, "10": null },
  mode: "matches",
  align: "warp",
  amount: 50,
  // The difference is shown 2 ** gain times as bright.
  gain: 2,
  show: { lines: true, dots: true, certainty: false, color: "position", epipolar: true },
  filter: { minScore: 0.5, count: 300, spread: true, thresholdPx: 3, inliersOnly: false },
  // Indices of the visible matches.
  visible: [],
  // Pointer position: {image: 0 or 1, x, y, other: {x, y, certainty} or null, how}.
  hover: null,
  // Kept points: {x0, y0, x1, y1, certainty}.
  kept: [],
  linked: true,
  times: {},
  // Times to draw the pointer marks, in milliseconds, latest last.
  frames: [],
  // Pointer marks that were drawn.
  marks: { lenses: [], line: null },
};

/** Return the commands that find the matches and fit the current model, {shell, python}. */
export function commands() {
  return state.estimate?.commands ?? state.result?.commands;
}

const watchers = new Map();

/** Call `run` when one of the topics changes. */
export function watch(topics, run) {
  for (const topic of topics.split(" ")) {
    if (!watchers.has(topic)) watchers.set(topic, []);
    watchers.get(topic).push(run);
  }
}

/** Set fields and notify their observers. */
export function change(patch) {
  Object.assign(state, patch);
  const calls = new Set(Object.keys(patch).flatMap((topic) => watchers.get(topic) ?? []));
  for (const run of calls) run();
}

/** Return a copy with plain values, for tests and the console. */
export function snapshot(viewers, api) {
  const { phase, mode, align, amount, gain, show, filter, hover, kept, linked, times, frames, marks, estimate } = state;
  return structuredClone({
    phase, mode, align, amount, gain, show, filter, hover, kept, linked, times, frames, marks,
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

/** Return the number of matches within the inlier threshold. */
export function inlierCount() {
  if (!state.residuals) return null;
  return state.residuals.reduce((sum, error) => sum + (error <= state.filter.thresholdPx), 0);
}
