// Alignment of image 1 to image 0, by a homography or by the dense warp, and panoramas of both.

import { applyHomography, invert } from "./geometry.js";

const MOST_SIDE = 1600;
// Minimum certainty of pixels that the dense warp shows.
const LEAST_CERTAINTY = 0.15;
// Maximum width and height of a panorama, relative to image 0.
const MOST_GROWTH = 4;
const ROWS_AT_ONCE = 48;

const pause = () => new Promise((done) => setTimeout(done));

/** Write the bilinear sample of RGBA pixels at (x, y) to `out` at k; return false outside the image. */
function sample({ data, width, height }, x, y, out, k, weight) {
  if (!(x >= -0.5 && y >= -0.5 && x <= width - 0.5 && y <= height - 0.5)) return false;
  const cx = Math.min(Math.max(x, 0), width - 1), cy = Math.min(Math.max(y, 0), height - 1);
  const i = Math.min(cx | 0, Math.max(width - 2, 0)), j = Math.min(cy | 0, Math.max(height - 2, 0));
  const fx = cx - i, fy = cy - j;
  const a = 4 * (j * width + i), right = width > 1 ? 4 : 0, down = height > 1 ? 4 * width : 0;
  for (let c = 0; c < 3; c++) {
    const top = data[a + c] * (1 - fx) + data[a + right + c] * fx;
    const bottom = data[a + down + c] * (1 - fx) + data[a + down + right + c] * fx;
    out[k + c] += weight * (top * (1 - fy) + bottom * fy);
  }
  return true;
}

/** Fill a canvas of width x height with shade(x, y, out, k), which returns the alpha; yields to the browser regularly. */
async function fill(width, height, shade, signal) {
  const canvas = new OffscreenCanvas(width, height);
  const ctx = canvas.getContext("2d");
  const image = ctx.createImageData(width, height);
  const value = new Float64Array(3);
  for (let y = 0; y < height; y++) {
    if (y % ROWS_AT_ONCE === 0) {
      await pause();
      signal?.throwIfAborted();
    }
    for (let x = 0; x < width; x++) {
      value.fill(0);
      const alpha = shade(x, y, value, 0);
      if (alpha <= 0) continue;
      const k = 4 * (y * width + x);
      image.data[k] = value[0] + 0.5;
      image.data[k + 1] = value[1] + 0.5;
      image.data[k + 2] = value[2] + 0.5;
      image.data[k + 3] = 255 * alpha;
    }
  }
  ctx.putImageData(image, 0, 0);
  return canvas;
}

/** Return a canvas with image 1 aligned to image 0; `map` is {homography} or {warp}. */
export async function alignedImage(image0, image1, map, signal) {
  const factor = Math.min(1, MOST_SIDE / Math.max(image0.width, image0.height));
  const width = Math.round(image0.width * factor), height = Math.round(image0.height * factor);
  const pixels = image1.pixels(MOST_SIDE);
  const [sx, sy] = [pixels.width / image1.width, pixels.height / image1.height];
  const [ux, uy] = [image0.width / width, image0.height / height];
  const H = map.homography, found = { x: 0, y: 0, certainty: 0 };
  const shade = (x, y, out, k) => {
    const x0 = (x + 0.5) * ux - 0.5, y0 = (y + 0.5) * uy - 0.5;
    let x1, y1;
    if (H) {
      const w = H[2][0] * x0 + H[2][1] * y0 + H[2][2];
      x1 = (H[0][0] * x0 + H[0][1] * y0 + H[0][2]) / w;
      y1 = (H[1][0] * x0 + H[1][1] * y0 + H[1][2]) / w;
    } else {
      if (!map.warp.into(x0, y0, found) || found.certainty < LEAST_CERTAINTY) return 0;
      ({ x: x1, y: y1 } = found);
    }
    return sample(pixels, (x1 + 0.5) * sx - 0.5, (y1 + 0.5) * sy - 0.5, out, k, 1) ? 1 : 0;
  };
  return fill(width, height, shade, signal);
}

/** Return the frame of a panorama in pixels of image 0, {left, top, right, bottom}, or null if H allows none. */
export function panoramaFrame(image0, image1, H) {
  const back = invert(H);
  if (!back) return null;
  const frame = { left: -0.5, top: -0.5, right: image0.width - 0.5, bottom: image0.height - 0.5 };
  let sign = 0;
  for (const [x, y] of [[0, 0], [1, 0], [0, 1], [1, 1]].map(([i, j]) => [i * image1.width - 0.5, j * image1.height - 0.5])) {
    const w = back[2][0] * x + back[2][1] * y + back[2][2];
    // A corner beyond the horizon has no position in the plane of image 0.
    if (Math.abs(w) < 1e-12 || (sign && Math.sign(w) !== sign)) return null;
    sign = Math.sign(w);
    const [px, py] = applyHomography(back, x, y);
    frame.left = Math.min(frame.left, px);
    frame.top = Math.min(frame.top, py);
    frame.right = Math.max(frame.right, px);
    frame.bottom = Math.max(frame.bottom, py);
  }
  const grown = Math.max((frame.right - frame.left) / image0.width, (frame.bottom - frame.top) / image0.height);
  return grown > MOST_GROWTH ? null : frame;
}

/** Return a panorama, blended at the overlap, as {canvas, width, height}, or null if H allows none. */
export async function panorama(image0, image1, H, signal) {
  const frame = panoramaFrame(image0, image1, H);
  if (!frame) return null;
  const [wide, high] = [frame.right - frame.left, frame.bottom - frame.top];
  const factor = Math.min(1, (MOST_SIDE * 1.25) / Math.max(wide, high));
  const width = Math.max(Math.round(wide * factor), 1), height = Math.max(Math.round(high * factor), 1);
  const [pixels0, pixels1] = [image0.pixels(MOST_SIDE), image1.pixels(MOST_SIDE)];
  // Relative distance of a point from the image border, from 0 at the border to 1 at the center.
  const depth = (x, y, image) => Math.max(1e-4, 2 * Math.min((x + 0.5) / image.width, 1 - (x + 0.5) / image.width, (y + 0.5) / image.height, 1 - (y + 0.5) / image.height));
  const inside = (x, y, image) => x >= -0.5 && y >= -0.5 && x <= image.width - 0.5 && y <= image.height - 0.5;
  const read = (pixels, image, x, y, out, weight) =>
    sample(pixels, ((x + 0.5) * pixels.width) / image.width - 0.5, ((y + 0.5) * pixels.height) / image.height - 0.5, out, 0, weight);
  const shade = (x, y, out) => {
    const x0 = frame.left + ((x + 0.5) / width) * wide, y0 = frame.top + ((y + 0.5) / height) * high;
    const w = H[2][0] * x0 + H[2][1] * y0 + H[2][2];
    const x1 = (H[0][0] * x0 + H[0][1] * y0 + H[0][2]) / w, y1 = (H[1][0] * x0 + H[1][1] * y0 + H[1][2]) / w;
    const in0 = inside(x0, y0, image0), in1 = inside(x1, y1, image1);
    if (!in0 && !in1) return 0;
    const [w0, w1] = [in0 ? depth(x0, y0, image0) ** 2 : 0, in1 ? depth(x1, y1, image1) ** 2 : 0];
    if (in0) read(pixels0, image0, x0, y0, out, w0 / (w0 + w1));
    if (in1) read(pixels1, image1, x1, y1, out, w1 / (w0 + w1));
    return 1;
  };
  return { canvas: await fill(width, height, shade, signal), width: wide, height: high };
}
