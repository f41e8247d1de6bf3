// Stage: two linked viewers, their overlays, and the pointer position in both images.

import { certaintyColor, certaintyMap, drawCross, drawLens, drawLine, drawMarker, drawMatches, percent } from "./draw.js";
import { clamp, clipLine, epipolarLine, transpose } from "./geometry.js";
import { change, state, watch } from "./state.js";
import { Viewer } from "./viewer.js";

const LENS_SCALE = 8;
// Distance of a lens from its point.
const LENS_AWAY = 26;
// Border of the canvas of marks, for the crosshair and the shadow of the lens.
const MARKS_BORDER = 24;
// Size of a lens in pixels from which its label has words.
const ROOM_FOR_WORDS = 120;
const ACCENT = "#ffd43b";
const KEPT = "#3450c8";
const WAYS = ["01", "10"];

export class Stage {
  #frame = 0;
  #hoverFrame = 0;
  #maps = new Map();

  constructor(element) {
    this.element = element;
    this.viewers = [0, 1].map((i) => new Viewer(element.querySelector(`[data-pane="${i}"]`),
      `Image ${i}. Arrow keys move the point, Shift moves it by one pixel, Enter keeps it, plus and minus zoom.`));
    this.overlay = element.querySelector("#overlay");
    this.pins = element.querySelector("#pins");
    this.line = element.querySelector("#line");
    // A canvas for the marks of each image. They are small, because a canvas is copied whole when it changes.
    this.marks = [...element.querySelectorAll(".marks")];
    for (const i of [0, 1]) this.#listen(i);
    watch("visible show kept warps mode", () => this.redraw());
    watch("hover", () => this.redrawHover());
    watch("warps", () => {
      const { hover } = state;
      if (hover) change({ hover: { ...hover, other: this.find(hover.image, hover.x, hover.y) } });
    });
    new ResizeObserver(() => this.layout()).observe(element.parentElement);
    addEventListener("resize", () => this.layout());
  }

  /** Show new images. */
  take() {
    this.#maps.clear();
    state.images.forEach((image, i) => {
      const loaded = image?.loaded ?? null;
      if (this.viewers[i].source !== loaded) this.viewers[i].show(loaded);
    });
    this.layout();
  }

  /** Arrange the images side by side or one above the other, whichever shows them larger. */
  layout() {
    const images = state.images.map((image) => image?.loaded).filter(Boolean);
    const width = this.element.parentElement.clientWidth;
    if (!images.length || !width) return;
    const aspect = Math.min(...images.map((image) => image.width / image.height));
    const single = state.mode !== "matches";
    const most = Math.max(innerHeight - (single ? 250 : 200), 300);
    const beside = Math.min(most, width / 2 / aspect);
    const above = Math.min(Math.max(most, innerWidth < 900 ? innerHeight * 0.72 : 0) / 2, width / aspect);
    const stacked = !single && above > beside * 1.15;
    const height = single ? Math.min(most, width / aspect) : stacked ? 2 * above + 6 : beside;
    this.element.classList.toggle("stacked", stacked);
    this.element.style.height = `${Math.round(height)}px`;
    for (const viewer of this.viewers) viewer.resize();
    const ratio = devicePixelRatio;
    for (const canvas of [this.overlay, this.pins, this.line]) {
      canvas.width = Math.round(this.element.clientWidth * ratio);
      canvas.height = Math.round(this.element.clientHeight * ratio);
    }
    this.paint();
    this.paintHover();
  }

  /** Return the position of pane i on the stage. */
  pane(i) {
    const { origin: [x, y], size: [width, height] } = this.viewers[i];
    return { x, y, width, height };
  }

  /** Convert an image pixel to {x, y, inside} on the stage; `inside` is true if its pane shows it. */
  project(i, x, y) {
    const [sx, sy] = this.viewers[i].toScreen(x, y);
    const { origin, size: [width, height] } = this.viewers[i];
    return { x: sx + origin[0], y: sy + origin[1], inside: sx >= 0 && sy >= 0 && sx <= width && sy <= height };
  }

  redraw() {
    this.#frame ||= requestAnimationFrame(() => this.paint());
  }

  redrawHover() {
    this.#hoverFrame ||= requestAnimationFrame(() => this.paintHover());
  }

  #context(canvas) {
    const ctx = canvas.getContext("2d");
    ctx.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    ctx.clearRect(0, 0, canvas.width, canvas.height);
    return ctx;
  }

  #clip(ctx, i) {
    const { x, y, width, height } = this.pane(i);
    ctx.beginPath();
    ctx.rect(x, y, width, height);
    ctx.clip();
  }

  paint() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    const ctx = this.#context(this.overlay), pins = this.#context(this.pins);
    // An empty layer costs time to compose.
    this.pins.hidden = !state.kept.length;
    this.overlay.hidden = !(state.show.lines || state.show.dots || state.show.certainty);
    if (state.mode !== "matches") return;
    if (state.show.certainty) WAYS.forEach((way, i) => this.#paintCertainty(ctx, way, i));
    if (state.result) drawMatches(ctx, this, state);
    state.kept.forEach((point, n) => {
      for (const i of [0, 1]) {
        const { x, y, inside } = this.project(i, point[`x${i}`], point[`y${i}`]);
        if (inside) drawMarker(pins, x, y, String(n + 1), KEPT);
      }
    });
    if (state.result && !state.times.drawn) change({ times: { ...state.times, drawn: performance.now() } });
  }

  #paintCertainty(ctx, way, i) {
    const warp = state.warps[way];
    if (!warp) return;
    if (!this.#maps.has(warp)) this.#maps.set(warp, certaintyMap(warp));
    const a = this.project(i, -0.5, -0.5), { scale } = this.viewers[i].view;
    ctx.save();
    this.#clip(ctx, i);
    ctx.drawImage(this.#maps.get(warp), a.x, a.y, warp.width * scale, warp.height * scale);
    ctx.restore();
  }

  paintHover() {
    cancelAnimationFrame(this.#hoverFrame);
    this.#hoverFrame = 0;
    const { hover, frames } = state;
    this.element.classList.toggle("probing", Boolean(hover?.other));
    const start = performance.now(), drawn = hover && state.mode === "matches" ? this.#paintMarks(hover) : [];
    for (const canvas of [this.line, ...this.marks]) canvas.hidden = !drawn.includes(canvas);
    if (!drawn.length) return;
    frames.push(performance.now() - start);
    if (frames.length > 300) frames.shift();
  }

  /** Draw crosshairs, lenses and the epipolar line; return the canvases that show them. */
  #paintMarks(hover) {
    state.marks = { lenses: [], line: null };
    const places = [null, null];
    places[hover.image] = { x: hover.x, y: hover.y };
    places[1 - hover.image] = hover.other;
    const drawn = this.#paintEpipolar(hover) ? [this.line] : [];
    places.forEach((place, i) => {
      const image = state.images[i]?.loaded;
      if (!place || !image) return;
      const at = this.project(i, place.x, place.y);
      const color = i === hover.image ? ACCENT : certaintyColor(hover.other.certainty);
      const scale = Math.max(LENS_SCALE, this.viewers[i].view.scale * 2.5);
      const box = this.#lensBox(i, at);
      const ctx = this.#marksContext(i, at, box);
      if (at.inside) drawCross(ctx, at.x, at.y, color);
      const sure = box.size < ROOM_FOR_WORDS ? "" : " certain";
      const text = i === hover.image ? `${place.x.toFixed(0)}, ${place.y.toFixed(0)}` : `${percent(place.certainty)}${sure}`;
      drawLens(ctx, image, place, box, scale, color, text);
      state.marks.lenses.push({ image: i, x: place.x, y: place.y, box, scale, text });
      drawn.push(this.marks[i]);
    });
    return drawn;
  }

  /** Return a position next to the point, inside the pane, that does not hide the point. */
  #lensBox(i, at) {
    const pane = this.pane(i);
    const size = clamp(Math.min(pane.width, pane.height) * 0.42, 96, 176);
    const right = at.x + LENS_AWAY + size <= pane.x + pane.width;
    const top = at.y - LENS_AWAY - size >= pane.y;
    const x = right ? at.x + LENS_AWAY : at.x - LENS_AWAY - size, y = top ? at.y - LENS_AWAY - size : at.y + LENS_AWAY;
    return { size, x: clamp(x, pane.x + 6, pane.x + pane.width - size - 6), y: clamp(y, pane.y + 6, pane.y + pane.height - size - 6) };
  }

  /** Move the canvas of image i to a point and its lens; return its context, in pixels of the stage. */
  #marksContext(i, at, box) {
    const canvas = this.marks[i], side = box.size + LENS_AWAY + 2 * MARKS_BORDER;
    const [x, y] = ["x", "y"].map((axis) => Math.floor((at.inside ? Math.min(at[axis], box[axis]) : box[axis]) - MARKS_BORDER));
    const pixels = Math.ceil(side * devicePixelRatio);
    if (canvas.width !== pixels) {
      canvas.width = canvas.height = pixels;
      canvas.style.width = canvas.style.height = `${pixels / devicePixelRatio}px`;
    }
    canvas.style.transform = `translate(${x}px, ${y}px)`;
    const ctx = this.#context(canvas);
    ctx.translate(-x, -y);
    return ctx;
  }

  /** Draw the epipolar line; return false if there is none. */
  #paintEpipolar(hover) {
    const F = state.show.epipolar ? state.estimate?.fundamental : null;
    if (!F) return false;
    const i = 1 - hover.image, { width, height } = state.images[i];
    const ends = clipLine(epipolarLine(hover.image === 0 ? F : transpose(F), hover.x, hover.y), width, height);
    if (!ends) return false;
    state.marks.line = ends;
    const [a, b] = ends.map(([x, y]) => this.project(i, x, y));
    const ctx = this.#context(this.line);
    ctx.save();
    this.#clip(ctx, i);
    drawLine(ctx, [a.x, a.y], [b.x, b.y], "#ff6bcb");
    ctx.restore();
    return true;
  }

  /** Return the position of a point of image i in the other image: {x, y, certainty} or null. */
  find(i, x, y) {
    const found = state.warps[WAYS[i]]?.at(x, y);
    if (!found) return null;
    const other = state.images[1 - i];
    const inside = found.x >= -0.5 && found.y >= -0.5 && found.x <= other.width - 0.5 && found.y <= other.height - 0.5;
    return inside ? found : null;
  }

  #listen(i) {
    const viewer = this.viewers[i], other = this.viewers[1 - i];
    viewer.addEventListener("move", ({ detail: { x, y, how } }) => {
      change({ hover: viewer.contains(x, y) && state.phase !== "empty" ? { image: i, x, y, other: this.find(i, x, y), how } : null });
    });
    viewer.addEventListener("leave", () => { if (state.hover?.image === i) change({ hover: null }); });
    viewer.addEventListener("click", ({ detail: { x, y, how } }) => {
      const found = viewer.contains(x, y) && this.find(i, x, y);
      if (found) this.keep(i, { x, y }, found);
      else this.element.dispatchEvent(new CustomEvent("unknown", { detail: { how } }));
    });
    viewer.addEventListener("view", ({ detail }) => {
      if (state.linked && other.source) this.#follow(i, detail);
      this.element.dispatchEvent(new CustomEvent("zoomed"));
      this.redraw();
      this.redrawHover();
    });
    viewer.addEventListener("settle", () => { if (state.linked) this.#align(i); });
  }

  keep(i, point, found) {
    const kept = { certainty: found.certainty };
    [kept[`x${i}`], kept[`y${i}`]] = [point.x, point.y];
    [kept[`x${1 - i}`], kept[`y${1 - i}`]] = [found.x, found.y];
    change({ kept: [...state.kept, kept] });
  }

  /** Move the other viewer along; zooming in brings the corresponding point to the same position of its pane. */
  #follow(i, { factor, x, y, sx, sy, dx, dy }) {
    const viewer = this.viewers[i], other = this.viewers[1 - i];
    if (factor === 1) {
      other.view.x += dx ?? 0;
      other.view.y += dy ?? 0;
      other.place();
      return;
    }
    other.view.scale = other.fitScale * viewer.zoom;
    const found = this.find(i, x, y);
    const [ox, oy] = found ? [found.x, found.y] : [(x / viewer.source.width) * other.source.width, (y / viewer.source.height) * other.source.height];
    const [tx, ty] = [(sx / viewer.size[0]) * other.size[0], (sy / viewer.size[1]) * other.size[1]];
    other.anchor(ox, oy, tx, ty);
  }

  /** Center the other viewer on the point that corresponds to the center of this one. */
  #align(i) {
    const viewer = this.viewers[i], other = this.viewers[1 - i];
    if (viewer.zoom < 1.05 || !other.source) return;
    const [sx, sy] = [viewer.size[0] / 2, viewer.size[1] / 2];
    const found = this.find(i, ...viewer.toImage(sx, sy));
    if (found && found.certainty > 0.2) other.anchor(found.x, found.y, other.size[0] / 2, other.size[1] / 2);
    this.redraw();
  }

  zoomBy(factor) {
    this.viewers[0].zoomAt(factor);
    if (!state.linked) this.viewers[1].zoomAt(factor);
  }

  fit() {
    for (const viewer of this.viewers) viewer.fit();
    this.element.dispatchEvent(new CustomEvent("zoomed"));
    this.redraw();
    this.redrawHover();
  }
}
