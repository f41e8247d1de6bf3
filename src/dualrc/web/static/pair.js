// Pair view: input images, matching with progress, and the result.

import { Compare } from "./compare.js";
import { element } from "./dom.js";
import { startDownloads } from "./download.js";
import { showExamples } from "./examples.js";
import { startFilter, takeResult } from "./filter.js";
import { DenseWarp } from "./geometry.js";
import { homography, startGeometry } from "./geometry_panel.js";
import { decode, fetchView } from "./images.js";
import { chooser, showSlot, startInputs } from "./inputs.js";
import { startKept } from "./kept.js";
import { startLegend } from "./legend.js";
import { announce, clear, fail, failResult } from "./messages.js";
import { Stage } from "./stage.js";
import { change, commands, snapshot, state, watch } from "./state.js";

const byId = (id) => document.getElementById(id);
const VERDICT_ICONS = { same: "i-yes", unsure: "i-unsure", different: "i-no" };
const WARP_SIDE = 512;

export class PairView {
  // AbortController of the current run.
  #run = null;
  // Number of images given to each slot; images that arrive late are discarded.
  #turns = [0, 0];

  constructor(api) {
    this.api = api;
    this.stage = new Stage(byId("stage"));
    this.compare = new Compare(this.stage, () => homography(api));
    startFilter();
    startGeometry(api);
    startLegend(byId("legend"));
    startKept(this.stage);
    startDownloads(api, this.stage);
    startInputs((slot, files) => this.take(slot, files));
    this.#buttons();
    addEventListener("pagehide", () => this.#run?.abort());
    watch("phase opening", () => this.#showPhase());
    watch("result", () => this.#showResult());
    watch("result estimate", () => this.#showCommands());
    window.dualrcState = () => snapshot([...this.stage.viewers, this.compare.viewer], api);
  }

  #buttons() {
    const viewers = () => (state.mode === "matches" ? this.stage : this.compare.viewer);
    const zoom = (factor) => (state.mode === "matches" ? this.stage.zoomBy(factor) : viewers().zoomAt(factor));
    byId("zoom-in").addEventListener("click", () => zoom(1.5));
    byId("zoom-out").addEventListener("click", () => zoom(1 / 1.5));
    byId("zoom-fit").addEventListener("click", () => { viewers().fit(); this.#showZoom(); });
    byId("zoom-link").addEventListener("click", () => change({ linked: !state.linked }));
    watch("linked", () => byId("zoom-link").setAttribute("aria-pressed", state.linked));
    watch("mode result images", () => requestAnimationFrame(() => this.#showZoom()));
    this.stage.element.addEventListener("zoomed", () => this.#showZoom());
    byId("again").addEventListener("click", () => this.run());
    byId("cancel").addEventListener("click", () => this.cancel());
    byId("new-pair").addEventListener("click", () => this.reset());
    byId("quality").addEventListener("change", () => { if (state.result) this.run(); });
  }

  #showZoom() {
    const viewer = state.mode === "matches" ? this.stage.viewers[0] : this.compare.viewer;
    const percent = viewer.view.scale * 100;
    byId("zoom-level").textContent = `${percent >= 10 ? Math.round(percent) : percent.toPrecision(2)} %`;
  }

  /** Show qualities and examples when the service has sent them. */
  takeInfo(info) {
    byId("quality").replaceChildren(...info.qualities.map((name) => new Option(name, name)));
    showExamples(this.api, byId("example-list"), (name) => this.openExample(name));
  }

  /** Take files from the user; slot is 0, 1, or null for the next free one. */
  take(slot, files) {
    clear();
    const inFolder = !byId("view-folder").hidden;
    if (files.length > 2 || inFolder) {
      this.api.pendingFiles = files;
      // The folder view takes the files when it is opened, or opened again.
      if (inFolder) dispatchEvent(new HashChangeEvent("hashchange"));
      else location.hash = "#folder";
      return;
    }
    if (byId("view-pair").hidden) location.hash = "#pair";
    change({ times: { given: performance.now() } });
    if (files.length === 2) files.forEach((file, i) => this.#load(i, file));
    else this.#load(slot ?? (state.images[0] ? 1 : 0), files[0]);
  }

  async #load(i, file) {
    const turn = ++this.#turns[i];
    this.#abandon();
    this.#setImage(i, null);
    change({ phase: "uploading" });
    try {
      const sending = this.api.upload(file);
      // Errors are handled below; the decoded image is shown during the upload.
      sending.catch(() => {});
      let loaded = await decode(file);
      if (turn === this.#turns[i] && loaded) this.#setImage(i, { loaded, name: file.name, width: loaded.width, height: loaded.height, id: null });
      const sent = await sending;
      if (!loaded || loaded.width !== sent.width || loaded.height !== sent.height) loaded = await fetchView(this.api, sent);
      if (turn !== this.#turns[i]) return;
      const renew = (signal) => this.api.upload(file, signal);
      this.#setImage(i, { loaded, renew, name: file.name, width: sent.width, height: sent.height, id: sent.id });
      if (state.images.every((image) => image?.id)) await this.run();
    } catch (error) {
      if (turn !== this.#turns[i]) return;
      this.#setImage(i, null);
      change({ phase: state.images.some(Boolean) ? "uploading" : "empty" });
      fail(error, error.code === "gone" ? () => this.#load(i, file) : null);
    }
  }

  #setImage(i, image) {
    const images = [...state.images], old = images[i]?.loaded;
    images[i] = image;
    change({ images });
    // First, because it moves a focus that would be lost.
    this.#showPhase();
    const slot = document.querySelector(`.slot[data-slot="${i}"]`), focused = slot.contains(document.activeElement);
    showSlot(slot, image?.loaded ?? null, (to, files) => this.take(to, files));
    // The button that had the focus was replaced.
    if (focused) slot.querySelector("button").focus();
    this.#tag(i);
    this.stage.take();
    if (old && old !== image?.loaded) old.close();
  }

  #tag(i) {
    const { pane } = this.stage.viewers[i];
    pane.querySelector(".tag")?.remove();
    const image = state.images[i];
    if (!image) return;
    const tag = document.createElement("div");
    tag.className = "tag";
    const name = document.createElement("span");
    name.textContent = `${image.name}  ${image.width} × ${image.height}`;
    tag.append(name, ...chooser("Replace", "i-image", (files) => this.take(i, files), { name: `Replace image ${i} with another one`, className: "icon-button" }));
    pane.append(tag);
  }

  #showPhase() {
    const both = state.images.every(Boolean);
    const turned = both === byId("workbench").hidden;
    const lost = turned && byId(both ? "intro" : "workbench").contains(document.activeElement);
    byId("intro").hidden = both || state.opening;
    byId("opening").hidden = both || !state.opening;
    byId("workbench").hidden = !both;
    if (turned) scrollTo(0, 0);
    // Move the focus, which was on an element that is now hidden.
    if (lost) byId("main").focus({ preventScroll: true });
    byId("busy").hidden = state.phase !== "matching" && state.phase !== "uploading";
    byId("again").disabled = state.phase !== "ready" && state.phase !== "failed";
    if (state.phase === "uploading") this.#progress("Uploading", undefined);
  }

  #progress(text, fraction) {
    byId("busy-text").textContent = text;
    const bar = byId("busy-progress");
    if (Number.isFinite(fraction)) bar.value = fraction;
    else bar.removeAttribute("value");
  }

  #abandon() {
    this.#run?.abort();
    this.#run = null;
    change({ result: null, estimate: null, homography: null, warps: { "01": null, "10": null }, kept: [], hover: null, mode: "matches" });
  }

  /** Match the two images. */
  async run() {
    this.#abandon();
    const run = (this.#run = new AbortController());
    change({ phase: "matching" });
    let job = null;
    run.signal.addEventListener("abort", () => { if (job) this.api.json("DELETE", `v1/jobs/${job}`).catch(() => {}); });
    try {
      job = await this.#submit(run.signal).catch((error) => this.#submitAgain(error, run.signal));
      const done = await this.api.events(job, (progress) => this.#showProgress(progress), run.signal);
      job = null;
      this.#finish(await this.api.json("GET", done.result.replace(/^\//, ""), undefined, run.signal), run);
    } catch (error) {
      if (run !== this.#run) return;
      change({ phase: "failed" });
      fail(error, error.code === "unknown_id" ? null : () => this.run());
    }
  }

  /** Queue a match of the two images; return its job. */
  async #submit(signal) {
    this.#progress("Matching", undefined);
    const [image0, image1] = state.images.map((image) => image.id);
    const asked = { image0, image1, quality: byId("quality").value || undefined };
    return (await this.api.json("POST", "v1/match?wait=false", asked, signal)).job;
  }

  /** After images have expired on the server, give them to it once more, and queue the match. */
  async #submitAgain(error, signal) {
    if (error.code !== "unknown_id" || !state.images.every((image) => image.renew)) throw error;
    this.#progress("Uploading again", undefined);
    for (const image of state.images) image.id = (await image.renew(signal)).id;
    return this.#submit(signal);
  }

  #showProgress({ state: where, position, stage, step, fraction }) {
    if (where === "queued") this.#progress(position > 0 ? `Waiting at position ${position} of the queue` : "Waiting", undefined);
    // The number of steps of a match is not known beforehand.
    else if (stage === "matching") this.#progress(step > 2 ? `Matching, step ${step}` : "Matching", undefined);
    else this.#progress(stage ? stage[0].toUpperCase() + stage.slice(1) : "Matching", fraction);
  }

  #finish(result, run) {
    change({ result, estimate: result.estimate, phase: "ready" });
    takeResult(result);
    announce(`${result.verdict.text} ${result.count} matches.`);
    history.replaceState(null, "", `#pair/${result.pair}`);
    this.#loadWarps(result, run);
  }

  async #loadWarps({ pair }, run) {
    try {
      for (const way of ["01", "10"]) {
        const buffer = await this.api.buffer(`v1/pairs/${pair}/warp?direction=${way}&max_side=${WARP_SIDE}`, run.signal);
        if (run !== this.#run) return;
        change({ warps: { ...state.warps, [way]: new DenseWarp(buffer) } });
      }
      change({ times: { ...state.times, warped: performance.now() } });
    } catch (error) {
      if (run === this.#run) failResult(error, () => this.#loadWarps({ pair }, run));
    }
  }

  cancel() {
    if (!this.#run) return this.reset();
    this.#run.abort();
    this.#run = null;
    change({ phase: "failed" });
    announce("Cancelled");
  }

  async #openImages(load) {
    clear();
    this.#abandon();
    const turns = [++this.#turns[0], ++this.#turns[1]];
    change({ times: { given: performance.now() }, phase: "uploading", opening: true });
    let images, loaded;
    try {
      images = await load();
      loaded = await Promise.all(images.map((image) => fetchView(this.api, image)));
    } finally {
      change({ opening: false });
    }
    if (turns.some((turn, i) => turn !== this.#turns[i])) return false;
    images.forEach((image, i) => this.#setImage(i, { ...image, loaded: loaded[i] }));
    return true;
  }

  async openExample(name) {
    try {
      const opened = await this.#openImages(async () => {
        const ask = (signal) => this.api.json("POST", `v1/examples/${name}`, undefined, signal), made = await ask();
        return [0, 1].map((i) => ({ ...made[`image${i}`], renew: async (signal) => (await ask(signal))[`image${i}`] }));
      });
      if (opened) await this.run();
    } catch (error) {
      change({ phase: "empty" });
      fail(error, () => this.openExample(name));
    }
  }

  /** Open a stored result, linked by folder.js. */
  async openPair(pair) {
    if (state.result?.pair === pair) return;
    try {
      let result;
      const opened = await this.#openImages(async () => {
        result = await this.api.json("GET", `v1/pairs/${pair}`);
        return [0, 1].map((i) => {
          const [width, height] = result[`size${i}`];
          return { id: result[`image${i}`], name: result[`name${i}`] ?? `image ${i}`, width, height };
        });
      });
      if (opened) this.#finish(result, (this.#run = new AbortController()));
    } catch (error) {
      this.reset();
      fail(error);
    }
  }

  reset() {
    this.#abandon();
    this.#turns = this.#turns.map((turn) => turn + 1);
    change({ phase: "empty", times: {} });
    for (const i of [0, 1]) this.#setImage(i, null);
    history.replaceState(null, "", "#pair");
  }

  #showResult() {
    const { result } = state;
    const verdict = byId("verdict");
    verdict.className = `verdict ${result?.verdict.level ?? ""}`;
    verdict.textContent = result?.verdict.text ?? "Not matched yet";
    byId("counts").hidden = !result;
    if (!result) {
      byId("facts").textContent = "";
      byId("result-warning").hidden = true;
      return;
    }
    verdict.insertAdjacentHTML("afterbegin", `<svg class="icon" aria-hidden="true"><use href="#${VERDICT_ICONS[result.verdict.level]}"/></svg>`);
    const seconds = result.seconds < 10 ? result.seconds.toFixed(2) : result.seconds.toFixed(1);
    const tilted = result.tilted ? "; found through tilted views" : "";
    byId("facts").textContent = `${seconds} s on ${result.device}; pair score ${(Math.floor(100 * result.pair_score) / 100).toFixed(2)}${tilted}`;
    byId("result-warning").hidden = !result.warning;
    byId("result-warning").textContent = result.warning ?? "";
  }

  #showCommands() {
    for (const kind of ["shell", "python"]) {
      // Lines are broken between words only, not after a hyphen.
      const parts = (commands()?.[kind] ?? "").split(/(\s+)/).filter(Boolean);
      byId(`command-${kind}`).replaceChildren(...parts.map((part) => (/\S/.test(part) ? element("span", "word", part) : part)));
    }
  }
}
