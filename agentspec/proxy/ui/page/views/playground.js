// One prompt, answered with speculation off and on.

import { h } from "../dom.js";

export const title = "Playground";
export const needs = "uses_models";

export async function show(main, { session }) {
  main.append(h("h1", {}, title), h("p", { class: "muted" }, `Models: ${session.models.join(", ")}`));
}
