// Small line charts of the last half hour, one SVG path each.

import { h, svg } from "./dom.js";

const HEIGHT = 40;

// A figure titled `title`. Its `draw(points, most)` shows what `read` takes from each point, as `write` writes it.
export function chart(title, read, write) {
  const path = svg("path", { class: "line" });
  const picture = svg("svg", { role: "img", preserveAspectRatio: "none" }, path);
  const last = h("b", {});
  const range = h("span", { class: "muted" });
  const draw = (points, most) => {
    const values = points.map(read);
    const known = values.filter((value) => value != null);
    const top = Math.max(...known, 0);
    const shift = most - values.length; // a value is a dash as wide as its time, or one alone would not be seen
    const steps = values.map((value, at) => {
      if (value == null) return "";
      const joined = values[at - 1] != null;
      const y = top ? HEIGHT - 1 - (value / top) * (HEIGHT - 2) : HEIGHT - 1;
      return `${joined ? "L" : "M"}${shift + at} ${y.toFixed(1)}h1`;
    });
    picture.setAttribute("viewBox", `0 0 ${most} ${HEIGHT}`);
    path.setAttribute("d", steps.join(""));
    const newest = values.at(-1) ?? null;
    last.textContent = newest === null ? "–" : write(newest);
    range.textContent = known.length ? `at most ${write(top)}` : "nothing yet";
    picture.setAttribute("aria-label", `${title}: ${last.textContent} now, ${range.textContent} in 30 minutes`);
  };
  const element = h("figure", { class: "chart" }, h("figcaption", {}, h("span", {}, title), last), picture, range);
  return { element, draw };
}
