// Messages to the user: notices disappear after a while, errors stay until they are dismissed.

const NOTICE_MS = 4000;
const box = () => document.getElementById("messages");

function add(text, { bad = false, action = null } = {}) {
  const message = document.createElement("div");
  message.className = bad ? "message bad" : "message";
  message.setAttribute("role", bad ? "alert" : "status");
  const words = document.createElement("p");
  words.textContent = text;
  message.append(words);
  if (action) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "button small";
    button.textContent = action.label;
    button.addEventListener("click", () => { message.remove(); action.run(); });
    message.append(button);
  }
  const close = document.createElement("button");
  close.type = "button";
  close.className = "icon-button";
  close.setAttribute("aria-label", "Dismiss the message");
  close.innerHTML = '<svg class="icon" aria-hidden="true"><use href="#i-close"/></svg>';
  close.addEventListener("click", () => message.remove());
  message.append(close);
  box().append(message);
  return message;
}

/** Show a notice for a few seconds. */
export function say(text) {
  const message = add(text);
  setTimeout(() => message.remove(), NOTICE_MS);
}

/** Show an error, with an optional button to try again. */
export function fail(error, retry = null) {
  if (error?.name === "AbortError") return;
  const text = error?.message ?? String(error);
  // Do not show the same message twice.
  for (const old of box().querySelectorAll(".message.bad")) if (old.querySelector("p").textContent === text) old.remove();
  add(text, { bad: true, action: retry && { label: "Try again", run: retry } });
}

/** Show an error about the current result; an expired one can only be matched again. */
export function failResult(error, retry) {
  if (error?.code !== "unknown_id") return fail(error, retry);
  for (const old of box().querySelectorAll(".message.bad")) old.remove();
  add(error.message, { bad: true, action: { label: "Match again", run: () => document.getElementById("again").click() } });
}

/** Remove all messages. */
export function clear() {
  box().replaceChildren();
}

/** Announce a text to screen readers only. */
export function announce(text) {
  document.getElementById("live").textContent = text;
}
