// What each step of each workflow cost since the gateway started.

import { getJson } from "../api.js";
import { count, h, percent, seconds, table } from "../dom.js";

export const title = "Workflows";

export async function show(main, { session, signal }) {
  const { rows } = await getJson("/ui/data/workflows", { signal });
  const several = new Set(rows.map((row) => row.tenant)).size > 1;
  rows.sort((one, other) => other.model_seconds - one.model_seconds);
  const headings = [
    ...(several ? ["Tenant"] : []), "Workflow", "Step", "Calls", "Failed", "Time", "Prompt", "Tokens", "Tokens a step",
    "Saved, estimated", "Delegated", "Early tools",
  ];
  const cells = (row) => [
    ...(several ? [h("bdi", {}, row.tenant)] : []),
    named(row, session), h("bdi", {}, row.step ?? "–"), count(row.calls), count(row.failed_calls), seconds(row.model_seconds),
    count(row.prompt_tokens), count(row.completion_tokens),
    row.verify_steps ? (row.verified_tokens / row.verify_steps).toFixed(2) : "–",
    row.estimated_seconds_saved ? `${row.estimated_seconds_saved.toFixed(1)}\u00a0s` : "–",
    row.delegated_tokens ? percent(row.delegated_tokens / row.completion_tokens) : "–",
    row.early_tools ? count(row.early_tools) : "–",
  ];
  main.append(
    h("h1", {}, title),
    rows.length
      ? h("section", { class: "panel" }, table(headings, rows.map(cells), "The longest first"))
      : h("p", { class: "panel" }, "No request has named a workflow or a step."),
    h("p", { class: "muted" }, "Requests name their workflow and step by ",
      h("code", {}, "@step"), ", ", h("code", {}, "AgentSpecMiddleware"), " or the headers ",
      h("code", {}, "x-agentspec-workflow"), " and ", h("code", {}, "x-agentspec-step"), "."),
    h("p", { class: "muted" },
      "Saved: the time of each answer, compared with its tokens at the measured cost of one-token steps of the same engine (of a strategy: at its ",
      "base model's own pace). The run without speculation did not happen. Below 0, time was lost. Delegated: the share of tokens that a small model ",
      "wrote and the strategy kept. Early tools: tools whose result was there before the model called them, as AgentSpecMiddleware reports."),
  );
}

// The workflow's name, which leads to its runs where they are kept.
function named(row, session) {
  const name = h("bdi", {}, row.workflow ?? "–");
  if (!session.keeps_runs || !session.uses_models || row.workflow === null) return name;
  const chosen = new URLSearchParams({ workflow: row.workflow, step: row.step ?? "" });
  return h("a", { href: `#/runs/?${encodeURIComponent(chosen)}` }, name);
}
