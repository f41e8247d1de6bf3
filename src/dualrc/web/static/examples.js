// Example pairs on the start page.

function card({ name, title, description, thumbnails }, open) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "example";
  button.dataset.example = name;
  const [thumbs, strong, text] = ["span", "strong", "span"].map((tag) => document.createElement(tag));
  thumbs.className = "thumbs";
  thumbs.append(...thumbnails.map((src) => Object.assign(document.createElement("img"), { alt: "", loading: "lazy", src })));
  strong.textContent = title;
  text.textContent = description;
  text.className = "muted";
  button.append(thumbs, strong, text);
  button.addEventListener("click", () => open(name));
  return button;
}

/** Fill the list; open(name) is called when the user selects an example. */
export function showExamples(api, list, open) {
  list.replaceChildren(...api.info.examples.map((example) => card(example, open)));
  list.closest("section").hidden = !api.info.examples.length;
}
