// Overlays: lines, dots, kept points, the certainty map, magnifiers and epipolar lines.

const TAU = 2 * Math.PI;
const STEPS = 12;
export const INLIER = "#35a7ff";
export const OUTLIER = "#ff8a1f";
// Color map of scores and certainties, from dark violet (0) to yellow (1), readable with most types of color blindness.
const SCALE = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];

/** Return the color (r, g, b) of a value in 0 to 1. */
export function scaleColor(value) {
  const place = Math.min(Math.max(value, 0), 1) * (SCALE.length - 1);
  const i = Math.min(Math.floor(place), SCALE.length - 2);
  return SCALE[i].map((low, c) => Math.round(low + (SCALE[i + 1][c] - low) * (place - i)));
}

/** Return the color map as a CSS background, for legends. */
export function scaleGradient() {
  return `linear-gradient(90deg, ${SCALE.map((part) => `rgb(${part.join(" ")})`).join(", ")})`;
}

/** Return a certainty in percent; nothing is certain. */
export function percent(certainty) {
  return `${Math.min(Math.round(certainty * 100), 99)} %`;
}

/** Return the color of a marker for a certainty: green, amber or red. */
export function certaintyColor(certainty) {
  return certainty >= 0.6 ? "#4ade80" : certainty >= 0.3 ? "#fbbf24" : "#ff7a59";
}

/** Return the color of match k; there are only a few colors, so that lines can be drawn in batches. */
export function colorOf(k, { result, residuals, show, filter }) {
  if (show.color === "inlier" && residuals) return residuals[k] <= filter.thresholdPx ? INLIER : OUTLIER;
  if (show.color === "score") return `rgb(${scaleColor(Math.round(result.scores[k] * STEPS) / STEPS).join(" ")})`;
  const [x, y] = result.points0[k];
  const hue = Math.floor((x / result.size0[0]) * STEPS * 1.5) / (STEPS * 1.5);
  const light = Math.floor((y / result.size0[1]) * 6) / 6;
  return `hsl(${Math.round(190 + hue * 290)} 90% ${Math.round(70 - 18 * light)}%)`;
}

/** Return visible matches as {color: [[x0, y0, x1, y1], ...]} on the stage, without ends outside their pane. */
function place(stage, state) {
  const groups = new Map();
  for (const k of state.visible) {
    const a = stage.project(0, ...state.result.points0[k]);
    const b = stage.project(1, ...state.result.points1[k]);
    const color = colorOf(k, state);
    if (!groups.has(color)) groups.set(color, []);
    groups.get(color).push([a, b]);
  }
  return groups;
}

/** Draw lines and dots of the visible matches. */
export function drawMatches(ctx, stage, state) {
  const groups = place(stage, state);
  const many = state.visible.length;
  if (state.show.lines) {
    ctx.lineWidth = many > 1500 ? 0.7 : 1.1;
    ctx.globalAlpha = many > 1500 ? 0.35 : many > 300 ? 0.55 : 0.75;
    for (const [color, pairs] of groups) {
      ctx.strokeStyle = color;
      ctx.beginPath();
      for (const [a, b] of pairs) {
        if (!a.inside || !b.inside) continue;
        ctx.moveTo(a.x, a.y);
        ctx.lineTo(b.x, b.y);
      }
      ctx.stroke();
    }
    ctx.globalAlpha = 1;
  }
  if (!state.show.dots) return;
  const radius = many > 3000 ? 1.3 : many > 800 ? 1.8 : 2.4;
  const dots = (pairs, r) => {
    ctx.beginPath();
    for (const pair of pairs) {
      for (const { x, y, inside } of pair) {
        if (!inside) continue;
        ctx.moveTo(x + r, y);
        ctx.arc(x, y, r, 0, TAU);
      }
    }
    ctx.fill();
  };
  ctx.fillStyle = "rgb(0 0 0 / 55%)";
  for (const pairs of groups.values()) dots(pairs, radius + 0.8);
  for (const [color, pairs] of groups) {
    ctx.fillStyle = color;
    dots(pairs, radius);
  }
}

/** Return the certainty of a warp as a small canvas to draw over the image. */
export function certaintyMap(warp) {
  const canvas = new OffscreenCanvas(warp.columns, warp.rows);
  const ctx = canvas.getContext("2d");
  const image = ctx.createImageData(warp.columns, warp.rows);
  for (let i = 0; i < warp.columns * warp.rows; i++) {
    const known = !Number.isNaN(warp.values[3 * i]);
    image.data.set(scaleColor(known ? warp.values[3 * i + 2] : 0), 4 * i);
    image.data[4 * i + 3] = 178;
  }
  ctx.putImageData(image, 0, 0);
  return canvas;
}

/** Draw the numbered marker of a kept point. */
export function drawMarker(ctx, x, y, text, color) {
  ctx.beginPath();
  ctx.arc(x, y, 9.5, 0, TAU);
  ctx.fillStyle = color;
  ctx.fill();
  ctx.lineWidth = 2;
  ctx.strokeStyle = "#fff";
  ctx.stroke();
  ctx.fillStyle = "#fff";
  ctx.font = "600 11px Inter, system-ui, sans-serif";
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  ctx.fillText(text, x, y + 0.5);
}

/** Draw a crosshair with a gap at its center. */
export function drawCross(ctx, x, y, color, size = 11, gap = 4) {
  ctx.beginPath();
  for (const [dx, dy] of [[1, 0], [-1, 0], [0, 1], [0, -1]]) {
    ctx.moveTo(x + dx * gap, y + dy * gap);
    ctx.lineTo(x + dx * size, y + dy * size);
  }
  ctx.lineCap = "round";
  for (const [width, style] of [[4, "rgb(0 0 0 / 60%)"], [2, color]]) {
    ctx.lineWidth = width;
    ctx.strokeStyle = style;
    ctx.stroke();
  }
}

/** Draw a line with a dark outline between two points of the stage. */
export function drawLine(ctx, [ax, ay], [bx, by], color) {
  ctx.beginPath();
  ctx.moveTo(ax, ay);
  ctx.lineTo(bx, by);
  for (const [width, style] of [[4, "rgb(0 0 0 / 45%)"], [1.8, color]]) {
    ctx.lineWidth = width;
    ctx.strokeStyle = style;
    ctx.stroke();
  }
}

/**
 * Draw a magnifier around a point. box: {x, y, size} on the stage; scale: screen pixels per image pixel.
 * The text is shown below the lens on a dark background.
 */
export function drawLens(ctx, image, point, box, scale, color, text) {
  const { x, y, size } = box;
  ctx.save();
  ctx.beginPath();
  ctx.roundRect(x, y, size, size, 14);
  ctx.shadowColor = "rgb(0 0 0 / 50%)";
  ctx.shadowBlur = 18;
  ctx.fillStyle = "#0b0d10";
  ctx.fill();
  ctx.shadowColor = "transparent";
  ctx.clip();
  ctx.translate(x, y);
  image.draw(ctx, { scale, x: size / 2 - (point.x + 0.5) * scale, y: size / 2 - (point.y + 0.5) * scale }, size, size);
  ctx.restore();
  drawCross(ctx, x + size / 2, y + size / 2, color, 16, Math.max(scale / 2, 5));
  if (text) {
    ctx.font = "600 12px Inter, system-ui, sans-serif";
    const width = ctx.measureText(text).width + 16;
    ctx.beginPath();
    ctx.roundRect(x + (size - width) / 2, y + size - 27, width, 20, 10);
    ctx.fillStyle = "rgb(8 10 14 / 82%)";
    ctx.fill();
    ctx.fillStyle = "#fff";
    ctx.textAlign = "center";
    ctx.textBaseline = "middle";
    ctx.fillText(text, x + size / 2, y + size - 16.5);
  }
  ctx.beginPath();
  ctx.roundRect(x, y, size, size, 14);
  ctx.lineWidth = 2.5;
  ctx.strokeStyle = "#fff";
  ctx.stroke();
}
