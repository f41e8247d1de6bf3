// Decoded images as pyramids of bitmaps; only the visible part is drawn.

// Image side below which no coarser level is created.
const SMALLEST_LEVEL = 700;
// Scale, in screen pixels per image pixel, above which single pixels are shown as squares.
const SHARP_FROM = 3;

export class LoadedImage {
  /** bitmap: ImageBitmap or canvas that shows the whole image; width and height are those of the upright original. */
  constructor({ name, width, height, bitmap }) {
    Object.assign(this, { name, width, height });
    this.levels = [{ bitmap, ratio: bitmap.width / width }];
    this.ready = this.#build();
  }

  async #build() {
    for (;;) {
      const { bitmap } = this.levels.at(-1);
      const [width, height] = [Math.round(bitmap.width / 2), Math.round(bitmap.height / 2)];
      if (Math.max(width, height) < SMALLEST_LEVEL || this.closed) return;
      let half;
      try {
        half = await createImageBitmap(bitmap, { resizeWidth: width, resizeHeight: height, resizeQuality: "medium" });
      } catch {
        // The image was closed or memory is short: continue with the existing levels.
        return;
      }
      this.levels.push({ bitmap: half, ratio: half.width / this.width });
    }
  }

  close() {
    this.closed = true;
    for (const { bitmap } of this.levels) bitmap.close?.();
  }

  /** Return the coarsest level that has a pixel for each screen pixel. */
  level(scale) {
    for (let i = this.levels.length - 1; i > 0; i--) if (this.levels[i].ratio >= scale * 0.95) return this.levels[i];
    return this.levels[0];
  }

  /** Draw the part that is visible on a width x height screen; view: {scale, x, y} in device pixels. */
  draw(ctx, view, width, height) {
    const { bitmap } = this.level(view.scale);
    const [rx, ry] = [bitmap.width / this.width, bitmap.height / this.height];
    const left = Math.max(Math.floor((-view.x / view.scale) * rx), 0);
    const top = Math.max(Math.floor((-view.y / view.scale) * ry), 0);
    const right = Math.min(Math.ceil(((width - view.x) / view.scale) * rx), bitmap.width);
    const bottom = Math.min(Math.ceil(((height - view.y) / view.scale) * ry), bitmap.height);
    if (right <= left || bottom <= top) return;
    ctx.imageSmoothingEnabled = view.scale < SHARP_FROM;
    ctx.drawImage(bitmap, left, top, right - left, bottom - top, view.x + (left / rx) * view.scale, view.y + (top / ry) * view.scale,
      ((right - left) / rx) * view.scale, ((bottom - top) / ry) * view.scale);
  }

  /** Return RGBA values with a long side of at most `maxSide`. */
  pixels(maxSide) {
    const factor = Math.min(1, maxSide / Math.max(this.width, this.height));
    const width = Math.max(Math.round(this.width * factor), 1), height = Math.max(Math.round(this.height * factor), 1);
    const canvas = new OffscreenCanvas(width, height);
    const ctx = canvas.getContext("2d", { willReadFrequently: true });
    ctx.imageSmoothingQuality = "high";
    ctx.drawImage(this.level(factor).bitmap, 0, 0, width, height);
    return ctx.getImageData(0, 0, width, height);
  }
}

/** Decode a file upright; return null if the browser does not support the format. */
export async function decode(file) {
  try {
    const bitmap = await createImageBitmap(file, { imageOrientation: "from-image" });
    return new LoadedImage({ name: file.name ?? "image", width: bitmap.width, height: bitmap.height, bitmap });
  } catch {
    return null;
  }
}

/** Load the view of an image from the service, for examples, stored pairs and formats that the browser cannot read. */
export async function fetchView(api, { id, name, width, height }, maxSide = 4096) {
  const blob = await api.blob(`v1/images/${id}/view?max_side=${Math.min(maxSide, Math.max(width, height))}`);
  return new LoadedImage({ name, width, height, bitmap: await createImageBitmap(blob) });
}
