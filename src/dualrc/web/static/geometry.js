// Two-view geometry in pixels: the center of the first pixel is (0, 0).

/** Dense warp from one image to the other, in the format of the service. */
export class DenseWarp {
  /** buffer: uint32 grid_w, grid_h, w0, h0, then float32 (x1, y1, certainty) of each cell's center. */
  constructor(buffer) {
    const header = new Uint32Array(buffer, 0, 4);
    [this.columns, this.rows, this.width, this.height] = header;
    this.values = new Float32Array(buffer, 16);
    // Distance between neighboring cells, in pixels of image 0.
    this.stepX = this.width / this.columns;
    this.stepY = this.height / this.rows;
  }

  /** Return the position of (x, y) in the other image, {x, y, certainty}, or null if it is unknown. */
  at(x, y) {
    const found = { x: 0, y: 0, certainty: 0 };
    return this.into(x, y, found) ? found : null;
  }

  /** Same as `at` without a new object, for whole images; returns false if the position is unknown. */
  into(x, y, found) {
    const { columns, rows, values } = this;
    const gx = clamp((x + 0.5) / this.stepX - 0.5, 0, columns - 1), gy = clamp((y + 0.5) / this.stepY - 0.5, 0, rows - 1);
    const i = Math.min(Math.floor(gx), Math.max(columns - 2, 0)), j = Math.min(Math.floor(gy), Math.max(rows - 2, 0));
    // Known corner with the largest weight.
    let total = 0, nearest = -1, most = 0;
    for (let corner = 0; corner < 4; corner++) {
      const k = this.#corner(corner, i, j), weight = this.#weight(corner, gx - i, gy - j);
      if (weight === 0 || Number.isNaN(values[k])) continue;
      total += weight;
      if (weight > most) [most, nearest] = [weight, k];
    }
    if (total < 0.25) return false;
    // Skip neighbors on another surface, which move differently: their average lies on neither surface.
    const reach = 4 * Math.max(this.stepX, this.stepY) + 2;
    let [sx, sy, sc, sum, shiftX, shiftY] = [0, 0, 0, 0, 0, 0];
    for (let corner = 0; corner < 4; corner++) {
      const k = this.#corner(corner, i, j), weight = this.#weight(corner, gx - i, gy - j);
      if (weight === 0 || Number.isNaN(values[k])) continue;
      if (Math.abs(values[k] - values[nearest]) > reach || Math.abs(values[k + 1] - values[nearest + 1]) > reach) continue;
      sx += weight * values[k];
      sy += weight * values[k + 1];
      sc += weight * values[k + 2];
      sum += weight;
      shiftX += weight * (gx - i - (corner & 1)) * this.stepX;
      shiftY += weight * (gy - j - (corner >> 1)) * this.stepY;
    }
    // With all corners, the shifts cancel. If some are missing, correct the mean for its shift.
    found.x = (sx + shiftX) / sum;
    found.y = (sy + shiftY) / sum;
    found.certainty = sc / sum;
    return true;
  }

  #corner(corner, i, j) {
    return 3 * (Math.min(j + (corner >> 1), this.rows - 1) * this.columns + Math.min(i + (corner & 1), this.columns - 1));
  }

  #weight(corner, fx, fy) {
    return (corner & 1 ? fx : 1 - fx) * (corner >> 1 ? fy : 1 - fy);
  }
}

export function clamp(value, low, high) {
  return Math.min(Math.max(value, low), high);
}

/** Apply H (3x3 rows) to a point; return null at infinity. */
export function applyHomography(H, x, y) {
  const w = H[2][0] * x + H[2][1] * y + H[2][2];
  if (Math.abs(w) < 1e-12) return null;
  return [(H[0][0] * x + H[0][1] * y + H[0][2]) / w, (H[1][0] * x + H[1][1] * y + H[1][2]) / w];
}

/** Return the inverse of a 3x3 matrix, or null if it is singular. */
export function invert(M) {
  const [[a, b, c], [d, e, f], [g, h, i]] = M;
  const det = a * (e * i - f * h) - b * (d * i - f * g) + c * (d * h - e * g);
  if (!Number.isFinite(det) || Math.abs(det) < 1e-18) return null;
  return [
    [(e * i - f * h) / det, (c * h - b * i) / det, (b * f - c * e) / det],
    [(f * g - d * i) / det, (a * i - c * g) / det, (c * d - a * f) / det],
    [(d * h - e * g) / det, (b * g - a * h) / det, (a * e - b * d) / det],
  ];
}

export function transpose(M) {
  return [0, 1, 2].map((i) => [0, 1, 2].map((j) => M[j][i]));
}

/** Return the epipolar line (a, b, c), a x + b y + c = 0, of (x, y) in the other image. */
export function epipolarLine(F, x, y) {
  return F.map((row) => row[0] * x + row[1] * y + row[2]);
}

/** Return the segment of a line inside a width x height image, [[x, y], [x, y]], or null. */
export function clipLine([a, b, c], width, height) {
  const [left, top, right, bottom] = [-0.5, -0.5, width - 0.5, height - 0.5];
  const ends = [];
  const add = (x, y) => {
    const inside = x >= left - 1e-6 && x <= right + 1e-6 && y >= top - 1e-6 && y <= bottom + 1e-6;
    if (inside && !ends.some(([ex, ey]) => Math.hypot(ex - x, ey - y) < 1e-6)) ends.push([x, y]);
  };
  if (b !== 0) for (const x of [left, right]) add(x, -(a * x + c) / b);
  if (a !== 0) for (const y of [top, bottom]) add(-(b * y + c) / a, y);
  return ends.length >= 2 ? [ends[0], ends[1]] : null;
}

/** Return the residual of each match in pixels: transfer error of a homography, Sampson distance otherwise. */
export function residuals(estimate, points0, points1) {
  const errors = new Float32Array(points0.length).fill(Infinity);
  const homography = estimate.kind === "homography";
  const M = homography ? estimate.matrix : estimate.fundamental;
  if (!M) return errors;
  const Mt = transpose(M);
  for (let k = 0; k < points0.length; k++) {
    const [x0, y0] = points0[k], [x1, y1] = points1[k];
    if (homography) {
      const there = applyHomography(M, x0, y0);
      if (there) errors[k] = Math.hypot(there[0] - x1, there[1] - y1);
    } else {
      const line1 = epipolarLine(M, x0, y0), line0 = epipolarLine(Mt, x1, y1);
      const product = Math.abs(line1[0] * x1 + line1[1] * y1 + line1[2]);
      errors[k] = product / Math.hypot(line1[0], line1[1], line0[0], line0[1]);
    }
  }
  return errors;
}
