// Elements of the folder and model views.

export function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  if (text) made.textContent = text;
  return made;
}

export function heading(tag, text) {
  return element(tag, "", text);
}
