// 3D view of a reconstruction; a click on a point shows its track in the images.

import { Cloud } from "./cloud.js";
import { element, heading } from "./dom.js";
import { announce, fail } from "./messages.js";

// Maximum number of images that are shown of a track.
const MOST_VIEWS = 24;
// Side of the image crop around a point, in pixels.
const CROP = 120;
const VIEW_SIDE = 1600;

let view = null;

/** Called each time the view is opened. */
export async function show(container, api) {
  if (!api.info?.reconstruction) {
    const words = element("p", "muted model-none", "This server has no reconstruction. Start it with: dualrc serve DIR, where DIR is the output folder of dualrc reconstruct.");
    container.replaceChildren(heading("h1", "Model"), words);
    return;
  }
  if (!view) {
    container.replaceChildren(element("p", "muted model-none", "Loading the model"));
    view = await ModelView.load(container, api);
  }
  view.cloud.draw();
}

class ModelView {
  #api;
  #views = new Map();
  #asked = 0;

  static async load(container, api) {
    const [described, packed] = await Promise.all([api.json("GET", "v1/reconstruction"), api.buffer("v1/reconstruction/points")]);
    return new ModelView(container, api, described, unpack(packed));
  }

  constructor(container, api, described, points) {
    this.#api = api;
    this.images = described.images;
    this.hasViews = described.views;
    this.points = points;
    const canvas = this.canvas = document.createElement("canvas");
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "application");
    canvas.setAttribute("aria-label", `3D view of ${points.count} points and ${this.images.length} cameras. Arrow keys rotate, with Shift they move, plus and minus zoom, 0 shows all, Enter selects the point in the center.`);
    const stage = element("div", "model-stage");
    const hint = matchMedia("(pointer: coarse)").matches
      ? "One finger rotates, two fingers move and zoom. Tap a point to see its images."
      : "Drag to rotate, drag with Shift or the right button to move, scroll to zoom. Click a point to see its images.";
    stage.append(canvas, element("p", "model-hint", hint));
    const side = element("div", "model-side");
    side.append(this.#controls(described), this.detail = element("section", "card model-detail"), this.#list());
    this.detail.setAttribute("aria-live", "polite");
    this.#explain();
    const root = element("div", "model");
    root.append(heading("h1", `Model: ${described.name}`), stage, side);
    container.replaceChildren(root);
    this.cloud = new Cloud(canvas, points, this.images.map((image) => pyramid(image, 1)));
    this.#scaleCameras();
    this.cloud.onClick = (x, y) => this.choose(this.cloud.pick(x, y));
    // Used by tests.
    container.viewer = this;
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.cloud.draw());
    new MutationObserver(() => this.cloud.draw()).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  }

  /** Draw the cameras in proportion to the scene. */
  #scaleCameras() {
    const { cloud } = this, size = cloud.radius * 0.06;
    cloud.cameras = this.images.map((image) => pyramid(image, size));
    const ends = cloud.cameras.flatMap(({ center, corners: [a, b, c, d] }) => [center, a, center, b, center, c, center, d, a, b, b, c, c, d, d, a].flat());
    cloud.gl.bindBuffer(cloud.gl.ARRAY_BUFFER, cloud.buffers.frames);
    cloud.gl.bufferData(cloud.gl.ARRAY_BUFFER, new Float32Array(ends), cloud.gl.STATIC_DRAW);
  }

  #controls(described) {
    const card = element("section", "card model-controls");
    const longest = this.points.tracks.reduce((most, length) => Math.max(most, length), 2);
    const size = slider("Point size", 1, 8, 0.5, 3, (value) => { this.cloud.size = value; this.cloud.draw(); });
    const least = slider("Seen by at least", 2, Math.min(longest, 20), 1, 2, (value) => { this.cloud.least = value; this.cloud.draw(); }, (value) => `${value} images`);
    const check = element("label", "check"), box = document.createElement("input");
    box.type = "checkbox";
    box.checked = true;
    box.addEventListener("change", () => { this.cloud.showCameras = box.checked; this.cloud.draw(); });
    check.append(box, "Cameras");
    const all = element("button", "button small", "Show all");
    all.type = "button";
    all.addEventListener("click", () => this.cloud.reset());
    const row = element("div", "row");
    row.append(check, element("span", "grow"), all);
    card.append(heading("h2", "View"), element("p", "muted", `${described.count.toLocaleString("en")} points, ${this.images.length} images`), size, least, row);
    return card;
  }

  #list() {
    const card = element("section", "card"), list = element("ol", "model-images");
    for (const [number, image] of this.images.entries()) {
      const item = document.createElement("li"), go = element("button", "button small", image.name);
      go.type = "button";
      go.addEventListener("click", () => this.look(number));
      item.append(go, element("span", "muted", ` ${image.observations.toLocaleString("en")} points`));
      list.append(item);
    }
    card.append(heading("h2", "Images"), list);
    return card;
  }

  #explain() {
    this.detail.replaceChildren(heading("h2", "Point"), element("p", "muted", "Select a point to see it in the images of its track."));
  }

  /** Move the view to the pose of an image. */
  async look(number) {
    const image = this.images[number], asked = ++this.#asked;
    this.cloud.selectedPoint = -1;
    this.cloud.flyTo(number);
    this.detail.replaceChildren(heading("h2", image.name), element("p", "muted", `${image.width}×${image.height} pixels`));
    try {
      const picture = await this.#view(number);
      if (!picture || asked !== this.#asked) return;
      const shown = document.createElement("canvas");
      shown.className = "model-whole";
      shown.setAttribute("role", "img");
      shown.setAttribute("aria-label", image.name);
      shown.width = 560;
      shown.height = Math.round((560 * picture.height) / picture.width);
      shown.getContext("2d").drawImage(picture, 0, 0, shown.width, shown.height);
      this.detail.append(shown);
    } catch (error) {
      fail(error);
    }
  }

  /** Show a point and its track, or nothing for -1. */
  async choose(index) {
    const asked = ++this.#asked;
    this.cloud.selectedPoint = index;
    this.cloud.selectedCamera = -1;
    this.cloud.seenBy = [];
    this.cloud.draw();
    if (index < 0) return this.#explain();
    try {
      const point = await this.#api.json("GET", `v1/reconstruction/points/${index}`);
      if (asked !== this.#asked) return undefined;
      // An image can observe a point twice.
      this.cloud.seenBy = [...new Set(point.track.map((seen) => Number(seen.image)))];
      this.cloud.draw();
      const error = point.error === null ? "" : `, error ${point.error.toFixed(2)} px`;
      const list = element("ul", "model-track");
      this.detail.replaceChildren(heading("h2", `Point ${index}`),
        element("p", "muted mono", point.xyz.map((value) => value.toFixed(3)).join(", ")),
        element("p", "muted", `Seen by ${this.cloud.seenBy.length} images${error}`), list);
      announce(`Point ${index}, seen by ${this.cloud.seenBy.length} images.`);
      for (const seen of point.track.slice(0, MOST_VIEWS)) {
        const item = document.createElement("li");
        item.append(element("span", "", seen.name), element("span", "muted mono", ` ${seen.x.toFixed(1)}, ${seen.y.toFixed(1)}`));
        list.append(item);
        if (this.hasViews) this.#crop(item, seen).catch(fail);
      }
      if (!this.hasViews) this.detail.append(element("p", "muted", "The server has no images of this model; start it with --images FOLDER to see them."));
      if (point.track.length > MOST_VIEWS) list.append(element("li", "muted", `and ${point.track.length - MOST_VIEWS} more`));
    } catch (error) {
      fail(error);
    }
    return undefined;
  }

  /** Return a crop of an image around a position, with a marker. */
  async #crop(item, seen) {
    const number = Number(seen.image), picture = await this.#view(number);
    if (!picture) return;
    const scale = picture.width / this.images[number].width, shown = document.createElement("canvas");
    shown.width = shown.height = 2 * CROP;
    shown.setAttribute("role", "img");
    shown.setAttribute("aria-label", `${seen.name} around ${seen.x.toFixed(0)}, ${seen.y.toFixed(0)}`);
    const context = shown.getContext("2d"), half = (CROP * scale) / 2;
    // The center of the first pixel is (0, 0), but (0.5, 0.5) on a canvas.
    const [x, y] = [(seen.x + 0.5) * scale, (seen.y + 0.5) * scale];
    context.drawImage(picture, x - half, y - half, 2 * half, 2 * half, 0, 0, 2 * CROP, 2 * CROP);
    for (const [width, color] of [[5, "#000"], [2, "#ff7a1a"]]) {
      context.lineWidth = width;
      context.strokeStyle = color;
      context.beginPath();
      context.arc(CROP, CROP, 14, 0, 2 * Math.PI);
      context.stroke();
    }
    item.prepend(shown);
  }

  /** Return an image as a cached bitmap, or null if the server has no images. */
  async #view(number) {
    if (!this.hasViews) return null;
    if (!this.#views.has(number)) {
      if (this.#views.size >= 32) {
        const [oldest] = this.#views.keys();
        this.#views.delete(oldest);
      }
      this.#views.set(number, this.#api.blob(`v1/reconstruction/images/${number}/view?max_side=${VIEW_SIDE}`).then((blob) => createImageBitmap(blob)));
    }
    try {
      return await this.#views.get(number);
    } catch (error) {
      this.#views.delete(number);
      throw error;
    }
  }
}

/** Unpack the points from the binary format of the service. */
export function unpack(packed) {
  const count = new DataView(packed).getUint32(0, true);
  return {
    count,
    xyz: new Float32Array(packed, 4, 3 * count),
    rgb: new Uint8Array(packed, 4 + 12 * count, 3 * count),
    // Copy the values, because they may not be aligned to four bytes.
    tracks: new Uint32Array(packed.slice(4 + 15 * count, 4 + 19 * count)),
  };
}

/** Return a camera in world coordinates: its center, the image corners at a depth, and its axes. */
function pyramid({ cam_from_world: pose, camera, width, height }, size) {
  const R = pose.map((row) => row.slice(0, 3)), t = pose.map((row) => row[3]);
  const turn = (ray) => [0, 1, 2].map((axis) => R[0][axis] * ray[0] + R[1][axis] * ray[1] + R[2][axis] * ray[2]);
  const center = turn(t).map((value) => -value);
  const K = camera?.K ?? [[width, 0, width / 2], [0, width, height / 2], [0, 0, 1]];
  const corners = [[-0.5, -0.5], [width - 0.5, -0.5], [width - 0.5, height - 0.5], [-0.5, height - 0.5]].map(([x, y]) => {
    const ray = turn([(x - K[0][2]) / K[0][0], (y - K[1][2]) / K[1][1], 1]);
    return center.map((value, axis) => value + ray[axis] * size);
  });
  return { center, corners, forward: turn([0, 0, 1]), up: turn([0, -1, 0]) };
}

let sliders = 0;
function slider(text, min, max, step, value, change, tell = (number) => String(number)) {
  const box = element("div", "slider"), label = element("label", "", text), input = document.createElement("input");
  const output = document.createElement("output");
  Object.assign(input, { type: "range", min, max, step, value, id: `model-slider-${sliders++}` });
  label.htmlFor = input.id;
  output.textContent = tell(value);
  input.addEventListener("input", () => {
    output.textContent = tell(input.valueAsNumber);
    change(input.valueAsNumber);
  });
  box.append(label, output, input);
  return box;
}
