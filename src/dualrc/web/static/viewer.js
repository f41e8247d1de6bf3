// Canvas that shows an image, with zoom and pan by mouse, touch and keyboard.

import { clamp } from "./geometry.js";

const MAX_SCALE = 48;
const CLICK_PX = 4;
// Frames that take longer are late. After several late frames, a moving image is drawn with fewer pixels, until it rests.
const LATE_MS = 25;
const LATE_FRAMES = 3;
const REST_MS = 200;

/**
 * Events, each with `detail`: move {x, y, how} in image pixels, leave, click {x, y}, view {anchor, factor, dx, dy}.
 * `view` maps image pixels to CSS pixels of the pane: (x + 0.5) * scale + view.x.
 */
export class Viewer extends EventTarget {
  #pointers = new Map();
  #moved = 0;
  #frame = 0;
  #late = 0;
  #rest = 0;

  constructor(pane, label) {
    super();
    this.pane = pane;
    this.canvas = document.createElement("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "application");
    this.canvas.setAttribute("aria-label", label);
    this.canvas.setAttribute("aria-roledescription", "image viewer");
    pane.prepend(this.canvas);
    this.source = null;
    this.view = { scale: 1, x: 0, y: 0 };
    this.size = [1, 1];
    // Pixels of the canvas per CSS pixel.
    this.ratio = 1;
    // Position of the pane; reading it from the element for each match would check the layout each time.
    this.origin = [0, 0];
    this.cursor = null;
    this.dragHook = null;
    // Whether one finger points at pixels; otherwise it moves the image.
    this.pointing = true;
    this.#listen();
  }

  /** Set the source, which has width, height and draw(ctx, view, width, height). */
  show(source) {
    this.source = source;
    this.cursor = null;
    this.fit();
  }

  get fitScale() {
    if (!this.source) return 1;
    return Math.min(this.size[0] / this.source.width, this.size[1] / this.source.height);
  }

  get zoom() {
    return this.view.scale / this.fitScale;
  }

  fit() {
    this.view.scale = this.fitScale;
    this.place();
  }

  /** Update the size of the pane; a view of the whole image stays one. */
  resize() {
    const whole = Math.abs(this.zoom - 1) < 0.01;
    const { clientWidth, clientHeight } = this.pane;
    if (!clientWidth || !clientHeight) return;
    this.size = [clientWidth, clientHeight];
    this.origin = [this.pane.offsetLeft, this.pane.offsetTop];
    if (whole) this.fit();
    else this.place();
    this.#setRatio(devicePixelRatio);
  }

  /** Draw with `ratio` pixels per CSS pixel. */
  #setRatio(ratio) {
    this.ratio = ratio;
    [this.canvas.width, this.canvas.height] = this.size.map((side) => Math.round(side * ratio));
    this.paint();
  }

  #notice(frameMs) {
    this.#late = frameMs > LATE_MS ? this.#late + 1 : 0;
    if (this.#late >= LATE_FRAMES && this.#rest && this.ratio > 1) this.#setRatio(1);
  }

  /** Limit the view and draw it with the next frame. */
  place() {
    if (!this.source) return;
    const view = this.view;
    view.scale = clamp(view.scale, Math.min(this.fitScale, MAX_SCALE), Math.max(MAX_SCALE, this.fitScale));
    for (const [axis, side, full] of [["x", this.size[0], this.source.width], ["y", this.size[1], this.source.height]]) {
      const shown = full * view.scale;
      view[axis] = shown <= side ? (side - shown) / 2 : clamp(view[axis], side - shown, 0);
    }
    clearTimeout(this.#rest);
    this.#rest = setTimeout(() => this.#settle(), REST_MS);
    this.redraw();
  }

  #settle() {
    this.#rest = this.#late = 0;
    if (this.ratio !== devicePixelRatio) this.#setRatio(devicePixelRatio);
  }

  redraw() {
    this.#frame ||= requestAnimationFrame((now) => {
      this.paint();
      requestAnimationFrame((next) => this.#notice(next - now));
    });
  }

  paint() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    const ctx = this.canvas.getContext("2d"), { ratio } = this;
    ctx.clearRect(0, 0, this.canvas.width, this.canvas.height);
    if (!this.source) return;
    const view = { scale: this.view.scale * ratio, x: this.view.x * ratio, y: this.view.y * ratio, ratio };
    this.source.draw(ctx, view, this.canvas.width, this.canvas.height);
  }

  /** Convert an image pixel to a CSS pixel of the pane. */
  toScreen(x, y) {
    return [(x + 0.5) * this.view.scale + this.view.x, (y + 0.5) * this.view.scale + this.view.y];
  }

  toImage(sx, sy) {
    return [(sx - this.view.x) / this.view.scale - 0.5, (sy - this.view.y) / this.view.scale - 0.5];
  }

  contains(x, y) {
    return this.source && x >= -0.5 && y >= -0.5 && x <= this.source.width - 0.5 && y <= this.source.height - 0.5;
  }

  /** Move image pixel (x, y) to (sx, sy) of the pane. */
  anchor(x, y, sx, sy) {
    this.view.x = sx - (x + 0.5) * this.view.scale;
    this.view.y = sy - (y + 0.5) * this.view.scale;
    this.place();
  }

  /** Zoom at (sx, sy) of the pane, where the pixel that is now at (sx - dx, sy - dy) is moved to. */
  zoomAt(factor, sx = this.size[0] / 2, sy = this.size[1] / 2, dx = 0, dy = 0) {
    if (!this.source) return;
    const [x, y] = this.toImage(sx - dx, sy - dy);
    const before = this.view.scale;
    this.view.scale = clamp(before * factor, this.fitScale, Math.max(MAX_SCALE, this.fitScale));
    this.anchor(x, y, sx, sy);
    this.#tell("view", { factor: this.view.scale / before, x, y, sx, sy, dx, dy });
  }

  panBy(dx, dy) {
    const { x, y } = this.view;
    this.view.x += dx;
    this.view.y += dy;
    this.place();
    // The view is at its limit, so there is nothing to draw.
    if (this.view.x !== x || this.view.y !== y) this.#tell("view", { factor: 1, dx, dy });
  }

  #tell(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }

  #point(event, how) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = this.toImage(event.clientX - box.left, event.clientY - box.top);
    return { x, y, how };
  }

  #listen() {
    const canvas = this.canvas;
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const box = canvas.getBoundingClientRect();
      const delta = event.deltaMode === 1 ? event.deltaY * 24 : event.deltaY;
      this.zoomAt(Math.exp(-clamp(delta, -240, 240) * 0.0022), event.clientX - box.left, event.clientY - box.top);
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.#down(event));
    canvas.addEventListener("pointermove", (event) => this.#move(event));
    canvas.addEventListener("pointerup", (event) => this.#up(event));
    canvas.addEventListener("pointercancel", (event) => this.#up(event, true));
    canvas.addEventListener("pointerleave", () => { if (!this.#pointers.size) this.#tell("leave"); });
    canvas.addEventListener("blur", () => this.#tell("leave"));
    canvas.addEventListener("keydown", (event) => this.#key(event));
  }

  #down(event) {
    if (event.button > 0) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.#pointers.set(event.pointerId, event);
    this.#moved = this.#pointers.size > 1 ? Infinity : 0;
    this.cursor = null;
    if (event.pointerType !== "touch") return;
    if (this.#pointers.size === 1) this.#tell("move", this.#point(event, "touch"));
    else this.#tell("leave");
  }

  #move(event) {
    const last = this.#pointers.get(event.pointerId);
    if (!last) {
      if (event.pointerType !== "touch") this.#tell("move", this.#point(event, "mouse"));
      return;
    }
    const [dx, dy] = [event.clientX - last.clientX, event.clientY - last.clientY];
    this.#moved += Math.hypot(dx, dy);
    if (this.#pointers.size === 2) {
      this.#pinch(event);
    } else if (this.dragHook?.(event)) {
      this.#pointers.set(event.pointerId, event);
    } else if (event.pointerType === "touch" && this.pointing) {
      // One finger points and two fingers move, because touch screens have no hover.
      this.#pointers.set(event.pointerId, event);
      this.#tell("move", this.#point(event, "touch"));
    } else if (this.#moved > CLICK_PX) {
      this.#pointers.set(event.pointerId, event);
      this.pane.classList.add("panning");
      this.panBy(dx, dy);
      this.#tell("move", this.#point(event, "mouse"));
    }
  }

  #pinch(event) {
    const spread = () => {
      const [a, b] = this.#pointers.values();
      return { size: Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY), x: (a.clientX + b.clientX) / 2, y: (a.clientY + b.clientY) / 2 };
    };
    const before = spread();
    this.#pointers.set(event.pointerId, event);
    const after = spread(), box = this.canvas.getBoundingClientRect();
    const factor = before.size > 0 ? after.size / before.size : 1;
    this.zoomAt(factor, after.x - box.left, after.y - box.top, after.x - before.x, after.y - before.y);
  }

  #up(event, cancelled = false) {
    if (!this.#pointers.delete(event.pointerId)) return;
    this.pane.classList.remove("panning");
    if (!cancelled && this.#moved <= CLICK_PX) this.#tell("click", this.#point(event, event.pointerType));
    if (!this.#pointers.size && this.#moved > CLICK_PX) this.#tell("settle");
  }

  #key(event) {
    if (!this.source || event.ctrlKey || event.metaKey || event.altKey) return;
    const { width, height } = this.source;
    this.cursor ??= this.toImage(this.size[0] / 2, this.size[1] / 2).map(Math.round);
    const step = event.shiftKey ? 1 : Math.max(1, Math.round(10 / this.view.scale));
    const moves = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step] };
    const [sx, sy] = this.toScreen(...this.cursor);
    if (moves[event.key]) {
      const [dx, dy] = moves[event.key];
      this.cursor = [clamp(this.cursor[0] + dx, 0, width - 1), clamp(this.cursor[1] + dy, 0, height - 1)];
      const [nx, ny] = this.toScreen(...this.cursor);
      const over = (value, side) => (value < 20 ? 20 - value : value > side - 20 ? side - 20 - value : 0);
      if (this.zoom > 1.01) this.panBy(over(nx, this.size[0]), over(ny, this.size[1]));
    } else if (event.key === "+" || event.key === "=") this.zoomAt(1.5, sx, sy);
    else if (event.key === "-") this.zoomAt(1 / 1.5, sx, sy);
    else if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    event.stopPropagation();
    const point = { x: this.cursor[0], y: this.cursor[1], how: "key" };
    this.#tell("move", point);
    if (event.key === "Enter" || event.key === " ") this.#tell("click", point);
  }
}
