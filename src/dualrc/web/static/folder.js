// Folder view: all pairs of a set of images are matched, and a heat map shows their scores.

import { ApiError } from "./api.js";
import { element, heading } from "./dom.js";
import { scaleColor, scaleGradient } from "./draw.js";
import { clamp } from "./geometry.js";
import { isImage } from "./inputs.js";
import { announce, fail, say } from "./messages.js";

const REFRESH_MS = 400;

let view = null;

/** Called each time the view is opened. */
export async function show(container, api) {
  view ??= new FolderView(container, api);
  const files = api.pendingFiles;
  api.pendingFiles = null;
  if (files?.length) await view.take(files);
}

class FolderView {
  #api;
  #images = [];
  #thumbnails = new Map();
  #scores = [];
  #pairs = {};
  #abort = null;
  #job = null;
  #cells = new Map();

  constructor(container, api) {
    this.#api = api;
    this.root = element("div", "folder empty");
    const drop = element("div", "folder-drop");
    drop.innerHTML = '<svg class="icon big-icon" aria-hidden="true"><use href="#i-folder"/></svg>';
    drop.append(heading("h1", "A folder of images"),
      element("p", "muted", `Drop up to ${api.info?.max_collection ?? 40} images, or a folder. All pairs are matched; brighter cells are more likely to show the same place.`));
    const row = element("div", "row");
    row.append(this.#chooser("Choose images", {}), this.#chooser("Choose a folder", { webkitdirectory: "" }));
    this.clear = button("Clear", () => this.#reset());
    this.clear.hidden = true;
    row.append(this.clear);
    drop.append(row);
    this.status = element("div", "folder-status");
    this.status.hidden = true;
    this.words = element("p", "muted");
    this.words.id = "folder-words";
    this.bar = document.createElement("progress");
    this.bar.max = 1;
    this.bar.setAttribute("aria-labelledby", "folder-words");
    this.cancel = button("Cancel", () => this.#cancel(), "small");
    this.status.append(this.words, this.bar, this.cancel);
    this.scroll = element("div", "folder-scroll");
    this.legend = this.#legend();
    this.best = element("section", "card folder-best");
    this.best.hidden = this.legend.hidden = true;
    addEventListener("pagehide", () => this.#stop());
    this.root.append(drop, this.status, this.scroll, this.legend, this.best);
    container.replaceChildren(this.root);
  }

  #chooser(text, attributes) {
    const label = element("label", "button");
    const input = document.createElement("input");
    Object.assign(input, { type: "file", multiple: true, accept: "image/*,.heic,.heif,.tif,.tiff", className: "visually-hidden" });
    for (const [name, value] of Object.entries(attributes)) input.setAttribute(name, value);
    input.addEventListener("change", () => {
      const files = [...input.files];
      input.value = "";
      this.take(files);
    });
    label.append(input, text);
    return label;
  }

  /** Upload files and match all pairs of the images. */
  async take(files) {
    const given = files.length, most = this.#api.info?.max_collection ?? 40;
    files = files.filter(isImage);
    if (!files.length) return fail(new ApiError("No images were found; choose JPEG, PNG or other image files."));
    if (files.length < given) say(`${given - files.length} of ${given} files are not images and are left out.`);
    if (files.length + this.#images.length > most) {
      say(`Only the first ${most} images are used, which is the limit of this server.`);
      files = files.slice(0, Math.max(0, most - this.#images.length));
    }
    await this.#stop();
    const abort = this.#abort = new AbortController();
    try {
      await this.#upload(files, abort.signal);
      if (this.#images.length < 2) return fail(new ApiError("At least two images are needed; add another one."));
      await this.#match(abort.signal);
    } catch (error) {
      fail(error);
    } finally {
      if (this.#abort === abort) {
        this.#abort = this.#job = null;
        this.status.hidden = true;
      }
    }
  }

  async #upload(files, signal) {
    for (const [number, file] of files.entries()) {
      this.#tell(`Uploading ${number + 1} of ${files.length}: ${file.name}`, number / files.length);
      try {
        const image = await this.#api.upload(file, signal);
        this.#images.push(image);
        this.#thumbnails.set(image.id, await this.#api.objectUrl(`v1/images/${image.id}/view?max_side=112`));
      } catch (error) {
        if (error.name === "AbortError" || error.code === "gone") throw error;
        // Continue with the other images.
        fail(error);
      }
      this.#scores = [];
      this.#pairs = {};
      this.#build();
    }
  }

  async #match(signal) {
    const total = (this.#images.length * (this.#images.length - 1)) / 2;
    this.#tell(`Matching ${total} pairs`, 0);
    const started = await this.#api.json("POST", "v1/collections", { images: this.#images.map((image) => image.id) }, signal);
    this.#job = started.job;
    const refresh = async () => this.#fill(await this.#api.json("GET", `v1/collections/${started.collection}`, undefined, signal));
    let last = 0;
    await this.#api.events(started.job, (progress) => {
      if (progress.state === "queued") return this.#tell(`Waiting at position ${progress.position} of the queue`, 0);
      this.#tell(`Matched ${progress.done ?? 0} of ${progress.total ?? total} pairs`, progress.fraction);
      if (performance.now() - last < REFRESH_MS) return;
      last = performance.now();
      refresh().catch(() => {});
    }, signal);
    await refresh();
    const same = Object.keys(this.#pairs).filter((key) => this.#score(...key.split(",").map(Number)) >= 0.9).length;
    announce(`All ${total} pairs are matched; ${same} of them show the same place.`);
  }

  #tell(text, fraction) {
    this.status.hidden = false;
    this.words.textContent = text;
    this.bar.value = fraction;
  }

  async #stop() {
    const job = this.#job;
    this.#abort?.abort();
    this.#abort = this.#job = null;
    if (job) await this.#api.json("DELETE", `v1/jobs/${job}`).catch(() => {});
  }

  async #cancel() {
    await this.#stop();
    this.status.hidden = true;
    say("Stopped. The pairs matched so far are kept.");
  }

  async #reset() {
    await this.#stop();
    for (const url of this.#thumbnails.values()) URL.revokeObjectURL(url);
    this.#thumbnails.clear();
    for (const image of this.#images) this.#api.json("DELETE", `v1/images/${image.id}`).catch(() => {});
    this.#images = [];
    this.#scores = [];
    this.#pairs = {};
    this.status.hidden = true;
    this.#build();
  }

  #score(i, j) {
    return this.#scores[i]?.[j] ?? null;
  }

  #fill(collection) {
    this.#scores = collection.scores;
    this.#pairs = collection.pairs;
    for (const [key, cell] of this.#cells) this.#paint(cell, ...key.split(",").map(Number));
    this.#listBest();
  }

  /** Rebuild the table after images were added or removed. */
  #build() {
    this.#cells.clear();
    this.root.classList.toggle("empty", !this.#images.length);
    this.clear.hidden = this.legend.hidden = !this.#images.length;
    this.best.hidden = true;
    if (!this.#images.length) return this.scroll.replaceChildren();
    const table = element("table", "folder-matrix");
    // Few images have large cells; many have small ones, and the matrix scrolls.
    table.style.setProperty("--cell", `${clamp(this.root.clientWidth / (this.#images.length + 1) - 6, 48, 96)}px`);
    const caption = element("caption", "visually-hidden", "Pair scores. Arrow keys move between cells, Enter opens a pair.");
    const head = document.createElement("thead"), body = document.createElement("tbody");
    const top = document.createElement("tr");
    top.append(document.createElement("td"), ...this.#images.map((image) => this.#label(image, "col")));
    head.append(top);
    for (const [i, image] of this.#images.entries()) {
      const row = document.createElement("tr");
      row.append(this.#label(image, "row"));
      for (let j = 0; j < this.#images.length; j++) {
        const cell = document.createElement("td");
        if (i === j) cell.className = "same";
        else {
          this.#cells.set(`${i},${j}`, cell);
          this.#paint(cell, i, j);
        }
        row.append(cell);
      }
      body.append(row);
    }
    table.append(caption, head, body);
    table.addEventListener("keydown", (event) => this.#move(event));
    this.scroll.replaceChildren(table);
  }

  #label(image, scope) {
    const label = document.createElement("th");
    label.scope = scope;
    const picture = document.createElement("img");
    const url = this.#thumbnails.get(image.id);
    if (url) picture.src = url;
    picture.alt = image.name;
    label.title = `${image.name}, ${image.width}×${image.height}`;
    label.append(picture);
    return label;
  }

  #paint(cell, i, j) {
    const score = this.#score(i, j), id = this.#pairs[`${Math.min(i, j)},${Math.max(i, j)}`];
    if (score === null || !id) return;
    const link = cell.firstElementChild ?? document.createElement("a");
    link.href = `#pair/${id}`;
    link.textContent = score >= 0.995 ? "1" : score.toFixed(2).slice(1);
    link.dataset.cell = `${i},${j}`;
    link.tabIndex = this.#cells.size && !this.root.querySelector("a[data-cell][tabindex='0']") ? 0 : link.tabIndex || -1;
    link.setAttribute("aria-label", `${this.#images[i].name} and ${this.#images[j].name}: score ${score.toFixed(2)}, ${words(score)}`);
    link.title = link.getAttribute("aria-label");
    const [red, green, blue] = scaleColor(score);
    // The content security policy allows style properties, but not style attributes.
    link.style.backgroundColor = `rgb(${red} ${green} ${blue})`;
    link.style.color = 0.299 * red + 0.587 * green + 0.114 * blue > 120 ? "#000" : "#fff";
    if (!link.parentElement) cell.append(link);
  }

  /** Move the focus with the arrow keys; the table is a single tab stop. */
  #move(event) {
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const step = steps[event.key], at = event.target.dataset?.cell;
    if (!step || !at) return;
    event.preventDefault();
    let [i, j] = at.split(",").map(Number);
    for (;;) {
      i += step[0];
      j += step[1];
      if (i < 0 || j < 0 || i >= this.#images.length || j >= this.#images.length) return;
      const next = this.#cells.get(`${i},${j}`)?.firstElementChild;
      if (!next) continue;
      event.target.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
      return;
    }
  }

  #listBest() {
    const found = Object.entries(this.#pairs).map(([key, id]) => ({ id, at: key.split(",").map(Number) }))
      .map((pair) => ({ ...pair, score: this.#score(...pair.at) ?? 0 })).filter((pair) => pair.score >= 0.1)
      .sort((a, b) => b.score - a.score).slice(0, 12);
    this.best.hidden = !Object.keys(this.#pairs).length;
    const list = element("ol", "folder-list");
    for (const { id, at, score } of found) {
      const item = document.createElement("li"), link = document.createElement("a");
      link.href = `#pair/${id}`;
      link.textContent = `${this.#images[at[0]].name} and ${this.#images[at[1]].name}`;
      item.append(link, element("span", "muted", ` ${score.toFixed(2)}, ${words(score)}`));
      list.append(item);
    }
    this.best.replaceChildren(heading("h2", "Best pairs"), found.length ? list : element("p", "muted", "No two images seem to show the same place."));
  }

  #legend() {
    const legend = element("div", "folder-legend");
    const scale = element("span", "folder-scale");
    scale.setAttribute("aria-hidden", "true");
    scale.style.backgroundImage = scaleGradient();
    legend.append(element("span", "muted", "0 nothing in common"), scale, element("span", "muted", "1 the same place"));
    return legend;
  }
}

function words(score) {
  return score >= 0.9 ? "the same place" : score >= 0.1 ? "not sure" : "probably not the same place";
}

function button(text, run, size = "") {
  const made = element("button", `button ${size}`.trim(), text);
  made.type = "button";
  made.addEventListener("click", run);
  return made;
}
