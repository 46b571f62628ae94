// Makes elements. Text becomes text nodes, never markup.

const SVG = "http://www.w3.org/2000/svg";

export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value == null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child != null && child !== false));
  return element;
}

// A table whose cells are texts or elements; wider than the page, it scrolls in itself.
export function table(headings, rows, caption) {
  const head = h("tr", {}, headings.map((text) => h("th", { scope: "col" }, text)));
  const body = rows.map((cells) => h("tr", {}, cells.map((cell) => h("td", {}, cell))));
  const made = h("table", {}, caption && h("caption", {}, caption), h("thead", {}, head), h("tbody", {}, body));
  return h("div", { class: "scrolling", tabindex: "0", role: "group", "aria-label": caption ?? headings[0] }, made);
}

export const figure = (value, label) => h("div", { class: "figure" }, h("b", {}, value), h("span", {}, label));

const number = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
export const count = (value) => number.format(value);
export const percent = (share) => `${Math.round(100 * share)}\u00a0%`;
export const seconds = (value) => (value < 1 ? `${Math.round(1000 * value)}\u00a0ms` : `${value.toFixed(value < 10 ? 2 : 1)}\u00a0s`);

export function bytes(value) {
  const step = Math.min(4, Math.floor(Math.log2(Math.max(1, value)) / 10));
  return `${number.format(value / 1024 ** step)}\u00a0${["B", "KiB", "MiB", "GiB", "TiB"][step]}`;
}

// How long ago a time, in seconds since 1970, was.
export function ago(time) {
  const passed = Math.max(0, Date.now() / 1000 - time);
  const [size, unit] = passed < 90 ? [1, "s"] : passed < 5400 ? [60, "min"] : passed < 129600 ? [3600, "h"] : [86400, "days"];
  return `${Math.round(passed / size)} ${unit} ago`;
}
