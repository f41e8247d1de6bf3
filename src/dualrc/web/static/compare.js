// Comparison of the aligned images: swipe, flicker, blend, difference and panorama.

import { alignedImage, panorama } from "./align.js";
import { fail } from "./messages.js";
import { change, state, watch } from "./state.js";
import { Viewer } from "./viewer.js";

const FLICKER_MS = 600;
// Gray level of pixels without a counterpart; black means that both images are equal.
const NOTHING = "#6b7280";
const byId = (id) => document.getElementById(id);

/** Source that draws image 0 and the aligned image 1 according to the mode. */
class Layers {
  constructor(image0, canvas) {
    Object.assign(this, { image0, canvas, width: image0.width, height: image0.height, flipped: false });
  }

  draw(ctx, view, width, height) {
    const over = () => {
      ctx.imageSmoothingEnabled = view.scale < 3;
      ctx.drawImage(this.canvas, view.x, view.y, this.width * view.scale, this.height * view.scale);
    };
    const { mode, amount } = state;
    this.image0.draw(ctx, view, width, height);
    ctx.save();
    if (mode === "swipe") {
      const split = view.x + (amount / 100) * this.width * view.scale;
      ctx.beginPath();
      ctx.rect(split, 0, width, height);
      ctx.clip();
      ctx.clearRect(split, 0, width, height);
      over();
    } else if (mode === "blend") {
      ctx.globalAlpha = amount / 100;
      over();
    } else if (mode === "difference") {
      ctx.globalCompositeOperation = "difference";
      over();
      // There is no difference where image 1 has no pixels.
      ctx.globalCompositeOperation = "destination-in";
      over();
      // Adding the picture to itself doubles its brightness.
      ctx.globalCompositeOperation = "lighter";
      for (let doubled = 0; doubled < state.gain; doubled++) ctx.drawImage(ctx.canvas, 0, 0);
      ctx.globalCompositeOperation = "destination-over";
      ctx.fillStyle = NOTHING;
      ctx.fillRect(view.x, view.y, this.width * view.scale, this.height * view.scale);
    } else if (this.flipped) over();
    ctx.restore();
    if (mode === "swipe") this.#handle(ctx, view, height);
  }

  #handle(ctx, view, height) {
    const x = view.x + (state.amount / 100) * this.width * view.scale, { ratio } = view, y = height / 2;
    ctx.fillStyle = "#fff";
    ctx.shadowColor = "rgb(0 0 0 / 60%)";
    ctx.shadowBlur = 8 * ratio;
    ctx.fillRect(x - ratio, 0, 2 * ratio, height);
    ctx.beginPath();
    ctx.arc(x, y, 17 * ratio, 0, 2 * Math.PI);
    ctx.fill();
    ctx.shadowBlur = 0;
    ctx.strokeStyle = "#14181d";
    ctx.lineWidth = 2 * ratio;
    ctx.lineCap = "round";
    ctx.beginPath();
    for (const side of [-1, 1]) {
      ctx.moveTo(x + side * 4 * ratio, y - 5 * ratio);
      ctx.lineTo(x + side * 9 * ratio, y);
      ctx.lineTo(x + side * 4 * ratio, y + 5 * ratio);
    }
    ctx.stroke();
  }
}

/** Viewer source that shows a canvas. */
class Still {
  constructor({ canvas, width, height }) {
    Object.assign(this, { canvas, width, height });
  }

  draw(ctx, view) {
    ctx.imageSmoothingEnabled = view.scale < 3;
    ctx.drawImage(this.canvas, view.x, view.y, this.width * view.scale, this.height * view.scale);
  }
}

export class Compare {
  #timer = 0;
  #task = null;
  #cache = new Map();

  /** homography: async () => matrix or null, called on demand. */
  constructor(stage, homography) {
    this.stage = stage;
    this.homography = homography;
    const pane = stage.element.querySelector('[data-pane="compare"]');
    this.viewer = new Viewer(pane, "Both images aligned. Plus and minus zoom, arrow keys move.");
    this.viewer.pointing = false;
    this.viewer.dragHook = (event) => state.mode === "swipe" && this.#drag(event);
    this.viewer.addEventListener("click", ({ detail: { x } }) => { if (state.mode === "swipe") this.#setAmount((100 * (x + 0.5)) / this.viewer.source.width); });
    this.viewer.addEventListener("view", () => stage.element.dispatchEvent(new CustomEvent("zoomed")));
    document.querySelectorAll('input[name="mode"]').forEach((input) => input.addEventListener("change", () => change({ mode: input.value })));
    byId("align").addEventListener("change", (event) => change({ align: event.target.value }));
    byId("amount").addEventListener("input", (event) => change({ amount: Number(event.target.value) }));
    byId("gain").addEventListener("input", (event) => change({ gain: Number(event.target.value) }));
    byId("flicker-toggle").addEventListener("click", () => { if (this.viewer.source) this.#play(!this.#timer); });
    byId("flicker-switch").addEventListener("click", () => {
      this.#play(false);
      if (this.viewer.source) this.#flip();
    });
    watch("mode align warps", () => this.refresh());
    watch("amount", () => { byId("amount").value = state.amount; this.viewer.redraw(); });
    watch("gain", () => { byId("gain-value").textContent = `× ${2 ** state.gain}`; this.viewer.redraw(); });
    watch("result estimate", () => {
      this.#cache.clear();
      // The images of the old source may be closed soon.
      if (!state.result) this.viewer.show(null);
    });
  }

  #setAmount(amount) {
    change({ amount: Math.min(Math.max(amount, 0), 100) });
  }

  #drag(event) {
    const box = this.viewer.canvas.getBoundingClientRect();
    const [x] = this.viewer.toImage(event.clientX - box.left, 0);
    this.#setAmount((100 * (x + 0.5)) / this.viewer.source.width);
    return true;
  }

  /** Show the current mode and alignment. */
  async refresh() {
    const { mode } = state, single = mode !== "matches";
    document.querySelector(`input[name="mode"][value="${mode}"]`).checked = true;
    this.viewer.pane.hidden = !single;
    for (const viewer of this.stage.viewers) viewer.pane.hidden = single;
    byId("compare-options").hidden = !single;
    byId("amount-field").hidden = mode !== "swipe" && mode !== "blend";
    byId("amount-label").textContent = mode === "blend" ? "Image 1" : "Position";
    byId("gain-field").hidden = mode !== "difference";
    byId("align").closest("label").hidden = mode === "panorama";
    // These controls belong to the two images side by side.
    byId("show-card").hidden = byId("zoom-link").hidden = single;
    byId("flicker-toggle").hidden = byId("flicker-switch").hidden = mode !== "flicker";
    this.#stopFlicker();
    this.#task?.abort();
    this.stage.layout();
    if (!single || !state.result) return;
    this.viewer.resize();
    this.#task = new AbortController();
    try {
      await this.#build(mode, this.#task.signal);
    } catch (error) {
      fail(error);
    }
  }

  async #build(mode, signal) {
    const [image0, image1] = state.images.map((image) => image.loaded);
    const key = mode === "panorama" ? "panorama" : state.align;
    let made = this.#cache.get(key);
    if (!made) {
      byId("compare-note").textContent = "Aligning the images";
      made = await this.#make(key, image0, image1, signal);
      signal.throwIfAborted();
      if (!made) return this.viewer.show(null);
      this.#cache.set(key, made);
    }
    const what = {
      swipe: "Image 0 is left of the handle, image 1 is right of it. Pixels without a match are empty.",
      blend: "Pixels without a match show image 0 only.",
      difference: "Equal pixels are black, pixels without a match are gray.",
      panorama: "The homography maps image 1 into the plane of image 0.",
    };
    byId("compare-note").textContent = what[mode] ?? "";
    if (this.viewer.source !== made) this.viewer.show(made);
    this.viewer.resize();
    if (mode === "flicker") this.#startFlicker();
    this.stage.element.dispatchEvent(new CustomEvent("zoomed"));
    change({ times: { ...state.times, compared: performance.now() } });
  }

  /** Return a source for the viewer, or null with a note for the user. */
  async #make(key, image0, image1, signal) {
    const note = byId("compare-note");
    if (key === "warp") {
      if (!state.warps["01"]) {
        note.textContent = "The dense warp is not ready yet.";
        return null;
      }
      return new Layers(image0, await alignedImage(image0, image1, { warp: state.warps["01"] }, signal));
    }
    const H = await this.homography();
    if (!H) {
      note.textContent = "No homography fits these matches; use the dense warp to align the images.";
      return null;
    }
    if (key === "homography") return new Layers(image0, await alignedImage(image0, image1, { homography: H }, signal));
    const both = await panorama(image0, image1, H, signal);
    if (!both) note.textContent = "The homography stretches image 1 too far for a panorama.";
    return both && new Still(both);
  }

  #flip(flipped = !this.viewer.source.flipped) {
    this.viewer.source.flipped = flipped;
    byId("compare-note").textContent = `Image ${flipped ? 1 : 0}. Pixels without a match do not change.`;
    this.viewer.redraw();
  }

  #startFlicker() {
    this.#flip(false);
    // With reduced motion, the user starts it, or switches the images.
    this.#play(!matchMedia("(prefers-reduced-motion: reduce)").matches);
  }

  #play(on) {
    clearInterval(this.#timer);
    this.#timer = on ? setInterval(() => this.#flip(), FLICKER_MS) : 0;
    byId("flicker-toggle").textContent = on ? "Pause" : "Play";
  }

  #stopFlicker() {
    this.#play(false);
    if (this.viewer.source instanceof Layers) this.viewer.source.flipped = false;
  }
}
