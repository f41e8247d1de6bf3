// Start of the page: theme, help, token, views and keyboard shortcuts.

import { Api } from "./api.js";
import { clear, fail } from "./messages.js";
import { PairView } from "./pair.js";
import { change, state } from "./state.js";

const byId = (id) => document.getElementById(id);
const THEMES = ["auto", "light", "dark"];
const KEYS = [
  ["?", "show this help"],
  ["m", "matches"], ["s", "swipe"], ["f", "flicker"], ["b", "blend"], ["d", "difference"], ["p", "panorama"],
  ["l", "lines on or off"], ["o", "dots on or off"], ["c", "certainty on or off"],
  ["+ −", "zoom in or out"], ["0", "show the whole images"],
  ["Esc", "cancel matching"],
  ["← ↑ → ↓", "in an image: move the point; with Shift by one pixel"],
  ["Enter", "in an image: keep the point"],
];
const MODES = { m: "matches", s: "swipe", f: "flicker", b: "blend", d: "difference", p: "panorama" };
const LAYERS = { l: "lines", o: "dots", c: "certainty" };

/** Ask for the token; `wrong` tells that the server did not accept the last one. */
function askToken(wrong) {
  const dialog = byId("token");
  byId("token-wrong").hidden = !wrong;
  return new Promise((done) => {
    dialog.addEventListener("close", () => {
      const value = byId("token-value").value;
      byId("token-value").value = "";
      done(value);
    }, { once: true });
    if (!dialog.open) dialog.showModal();
  });
}

function startTheme() {
  const button = byId("theme");
  const current = () => document.documentElement.dataset.theme ?? "auto";
  const show = () => {
    const label = `Theme: ${current() === "auto" ? "automatic" : current()}`;
    button.setAttribute("aria-label", label);
    button.title = label;
  };
  button.addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(current()) + 1) % THEMES.length];
    if (next === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    localStorage.setItem("dualrc-theme", next);
    show();
  });
  show();
}

function startHelp() {
  const list = byId("keys");
  for (const [key, what] of KEYS) {
    const [term, words] = [document.createElement("dt"), document.createElement("dd")];
    for (const part of key.split(" ")) term.append(Object.assign(document.createElement("kbd"), { textContent: part }), " ");
    words.textContent = what;
    list.append(term, words);
  }
  byId("help-open").addEventListener("click", () => byId("help").showModal());
  byId("help").querySelector("[data-close]").addEventListener("click", () => byId("help").close());
  const box = byId("use-shortcuts");
  box.checked = localStorage.getItem("dualrc-shortcuts") !== "off";
  box.addEventListener("change", () => localStorage.setItem("dualrc-shortcuts", box.checked ? "on" : "off"));
}

function startKeys(pair) {
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.key === "Escape" && state.phase === "matching") return pair.cancel();
    if (!byId("use-shortcuts").checked || event.target.closest("select, textarea, input:not([type=checkbox]):not([type=radio]):not([type=range])")) return;
    if (event.key === "?") return byId("help").showModal();
    if (byId("view-pair").hidden || !state.result) return;
    if (MODES[event.key]) change({ mode: MODES[event.key] });
    else if (LAYERS[event.key]) change({ show: { ...state.show, [LAYERS[event.key]]: !state.show[LAYERS[event.key]] } });
    else if (event.key === "+" || event.key === "=") byId("zoom-in").click();
    else if (event.key === "-") byId("zoom-out").click();
    else if (event.key === "0") byId("zoom-fit").click();
    else return;
    event.preventDefault();
  });
}

async function route(api, pair) {
  const [, view = "pair", id = ""] = location.hash.match(/^#(pair|folder|model)(?:\/(.+))?$/) ?? [];
  // Messages are about the view that is left.
  if (byId(`view-${view}`).hidden) clear();
  for (const name of ["pair", "folder", "model"]) {
    byId(`view-${name}`).hidden = name !== view;
    const link = document.querySelector(`nav [data-view="${name}"]`);
    if (name === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `dualrc: ${view}`;
  try {
    if (view === "pair") {
      if (id) await pair.openPair(id);
      pair.stage.layout();
    } else {
      const { show } = await import(`./${view}.js`);
      await show(byId(`view-${view}`), api);
    }
  } catch (error) {
    fail(error);
  }
}

async function start() {
  startTheme();
  startHelp();
  const api = new Api(askToken);
  const pair = new PairView(api);
  startKeys(pair);
  // Hide the start page, which would flash before a stored pair.
  if (/^#pair\/./.test(location.hash)) change({ opening: true });
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault();
    byId("main").focus();
  });
  api.addEventListener("reach", ({ detail }) => byId("server").classList.toggle("gone", !detail));
  const learn = async () => {
    try {
      api.info = await api.json("GET", "v1/info");
      byId("server").textContent = `${api.info.device} · ${api.info.engine}`;
      document.querySelector('nav [data-view="model"]').hidden = !api.info.reconstruction;
      pair.takeInfo(api.info);
    } catch (error) {
      fail(error, learn);
    }
  };
  await learn();
  addEventListener("hashchange", () => route(api, pair));
  await route(api, pair);
  document.documentElement.dataset.ready = "true";
}

start();
