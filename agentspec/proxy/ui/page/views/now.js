// What the gateway does now, and did in the last half hour.

import { events } from "../api.js";
import { chart } from "../chart.js";
import { bytes, count, figure, h, percent, seconds, table } from "../dom.js";

export const title = "Now";
export const needs = "reads_metrics";

const maybe = (write) => (value) => (value == null ? "–" : write(value));
const FIGURES = [
  ["requests/s", (now) => now.requests, count, "charted"],
  ["failed/s", (now) => now.failed, count],
  ["running", (now) => now.running, count],
  ["waiting", (now) => now.queued, count, "charted"],
  ["tokens/s", (now) => now.tokens, count, "charted"],
  ["tokens a step", (now) => now.tokens_per_step, (value) => value.toFixed(2), "charted"],
  ["drafts accepted", (now) => now.acceptance.all, percent, "charted"],
  ["to the first token", (now) => now.first_token, seconds],
  ["memory", (now) => now.memory, bytes, "charted"],
  ["of it token index", (now) => now.index, bytes],
];
const AGAIN = 3000; // milliseconds until a gateway that is gone is asked again

export async function show(main, { signal }) {
  const charts = FIGURES.filter((one) => one[3]).map((one) => chart(...one));
  const figures = h("div", { class: "row" });
  const sources = h("div", {});
  const servers = h("div", {});
  const state = h("p", { role: "status", class: "muted" });
  main.append(
    h("h1", {}, title),
    state,
    h("section", { class: "panel" }, h("h2", {}, "The last seconds"), figures),
    h("section", { class: "panel" }, h("h2", {}, "The last 30 minutes"),
      h("div", { class: "charts" }, charts.map((one) => one.element))),
    h("section", { class: "panel" }, h("h2", {}, "Drafts accepted, by source"), sources),
    h("section", { class: "panel" }, h("h2", {}, "Upstreams"), servers),
    h("p", { class: "muted" }, "Tokens count when their answer ends. Tokens a step: of models that report their forwards."),
  );
  const draw = (points, most, now) => {
    figures.replaceChildren(...FIGURES.map(([label, read, write]) => figure(maybe(write)(read(now)), label)));
    charts.forEach((one) => one.draw(points, most));
    sources.replaceChildren(acceptance(now.acceptance));
    servers.replaceChildren(upstreams(now.members));
  };
  while (!signal.aborted) {
    try {
      let points = [];
      for await (const event of events("/ui/data/now", { signal })) {
        state.textContent = "";
        points = [...points, ...event.points].slice(-event.most);
        draw(points, event.most, event.now);
      }
    } catch (error) {
      if (signal.aborted || error.status) throw error;
    }
    state.textContent = "The gateway does not answer. It is asked again every few seconds.";
    await new Promise((done) => setTimeout(done, AGAIN));
  }
}

function acceptance({ all, ...bySource }) {
  const rows = Object.entries(bySource).map(([source, share]) => [
    h("span", {}, h("i", { class: `swatch token ${source}` }), source), maybe(percent)(share),
  ]);
  if (rows.length) return table(["Source", "Kept"], rows, "Of what each source proposed");
  return h("p", { class: "muted" }, "Nothing was drafted yet by an engine of this process, or by our plug-in in a server of a pool. Other servers report no sources.");
}

function upstreams(members) {
  const rows = members.map((one) => [
    one.backend, one.member, h("span", { class: one.state === "ready" ? "good" : "bad" }, one.state),
    count(one.in_flight), count(one.calls), count(one.failures),
  ]);
  if (rows.length) return table(["Backend", "Server", "State", "In flight", "Calls", "Failures"], rows, "Since the start");
  return h("p", { class: "muted" }, "All models run in this process.");
}
