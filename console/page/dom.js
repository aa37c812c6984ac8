// Elements made of texts: what a tenant chooses never becomes markup.

// An element with attributes and children; texts are texts.
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, String(value));
  }
  element.append(...children.flat().filter((child) => child != null && child !== false));
  return element;
}

// Sets a text only where it is another: screen readers and layout see no change otherwise.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// A list of names and values.
export function facts(pairs, name = "facts") {
  const known = pairs.filter(([, value]) => value != null && value !== "");
  return h("dl", { class: name }, known.flatMap(([key, value]) => [h("dt", {}, key), h("dd", {}, value)]));
}

// The same as tiles.
export function tiles(pairs) {
  return h("dl", { class: "tiles" }, pairs.map(([key, value]) => h("div", {}, h("dt", {}, key), h("dd", {}, value))));
}
