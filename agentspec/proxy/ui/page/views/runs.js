// The kept runs, and one of them.

import { getJson, getText } from "../api.js";
import { ago, count, h, seconds, table } from "../dom.js";
import { runView } from "../run.js";

export const title = "Runs";
export const needs = "uses_models";

export async function show(main, { path, session, signal }) {
  if (!session.keeps_runs) return main.append(h("h1", {}, title), advice());
  if (path && !path.startsWith("?")) return one(main, `name=${encodeURIComponent(path)}`, signal);
  const { workflow, step } = Object.fromEntries(new URLSearchParams(path));
  const all = (await getJson("/ui/data/runs", { signal })).runs;
  const runs = all.filter((run) => !workflow || run.steps.some(([one, other]) => one === workflow && (!step || other === step)));
  main.append(h("h1", {}, title));
  if (!runs.length) return main.append(h("p", {}, workflow ? "None of the kept runs has this step." : "Nothing was asked yet: calls appear here once they are answered."));
  const rows = runs.map((run) => [
    h("a", { href: `#/runs/${encodeURIComponent(run.id)}`, dir: "auto" }, run.title || run.id),
    h("bdi", {}, run.workflow ?? ""), count(run.calls), count(run.tokens), seconds(run.saved), ago(run.last),
  ]);
  main.append(h("div", { class: "panel" }, table(["Run", "Workflow", "Calls", "Tokens", "Saved (estimate)", "Last"], rows, "The newest first")));
}

async function one(main, query, signal) {
  const run = await getJson(`/ui/data/run?${query}`, { signal });
  const save = async () => {
    const file = new Blob([await getText(`/ui/data/run?${query}&form=html`)], { type: "text/html" });
    const link = h("a", { href: URL.createObjectURL(file), download: "run.html" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href));
  };
  main.append(
    h("p", { class: "row" }, h("a", { href: "#/runs" }, "All runs"), h("button", { type: "button", onclick: save }, "Save as one file")),
    runView(run));
}

const advice = () =>
  h("div", { class: "panel" },
    h("p", {}, "No runs are kept here, since they hold texts. To keep them, for each tenant apart, set how much they may take, in agentspec.toml:"),
    h("pre", {}, '[cache]\nruns_bytes = "64MiB"\nruns_retention = "7d"'),
    h("p", { class: "muted" }, "agentspec cache forget deletes them with everything else of a session, a tenant or a text."));
