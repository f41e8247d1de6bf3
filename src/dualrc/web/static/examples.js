// Example pairs on the start page.

function card({ name, title, description }, open) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "example";
  button.dataset.example = name;
  const [thumbs, strong, text] = ["span", "strong", "span"].map((tag) => document.createElement(tag));
  thumbs.className = "thumbs";
  strong.textContent = title;
  text.textContent = description;
  text.className = "muted";
  button.append(thumbs, strong, text);
  button.addEventListener("click", () => open(name));
  return button;
}

/** Load small views, one pair after the other, because the service may still be rendering them. */
async function addThumbs(api, list) {
  try {
    for (const { name } of api.info.examples) {
      const { image0, image1 } = await api.json("POST", `v1/examples/${name}`);
      const urls = await Promise.all([image0, image1].map(({ id }) => api.objectUrl(`v1/images/${id}/view?max_side=320`)));
      const images = urls.map((src) => Object.assign(document.createElement("img"), { src, alt: "" }));
      list.querySelector(`[data-example="${name}"] .thumbs`)?.replaceChildren(...images);
    }
  } catch {
    // The cards also have text, and errors of the service appear when it is used.
  }
}

/** Fill the list; open(name) is called when the user selects an example. */
export function showExamples(api, list, open) {
  list.replaceChildren(...api.info.examples.map((example) => card(example, open)));
  list.closest("section").hidden = !api.info.examples.length;
  // The list is not visible while a stored pair is open.
  new IntersectionObserver((entries, observer) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    observer.disconnect();
    addThumbs(api, list);
  }).observe(list);
}
