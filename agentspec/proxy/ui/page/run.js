// One run: a timeline of its calls, of what lay between them, and each call with its answer and what was decided.

import { count, figure, h, percent, seconds, table } from "./dom.js";
import { Answer, legend } from "./tokens.js";

export function runView(run) {
  const calls = run.calls;
  const [first, last] = [calls[0], calls.at(-1)];
  const sum = (of) => calls.reduce((total, call) => total + (of(call) ?? 0), 0);
  const written = sum((call) => call.usage?.completion_tokens);
  const accepted = sum((call) => call.speculation?.accepted);
  const wasted = sum((call) => call.speculation?.drafted) - accepted;
  const name = run.session ? `Session ${run.session}` : "One call";
  return h("article", {},
    h("h1", { dir: "auto" }, name),
    h("p", { class: "muted" }, new Date(1000 * first.at).toLocaleString(), first.workflow ? ` · ${first.workflow}` : ""),
    h("div", { class: "panel row" },
      figure(seconds(last.at + last.seconds - first.at), "from first to last"),
      figure(count(calls.length), calls.length === 1 ? "call" : "calls"),
      figure(count(written), "tokens written"),
      figure(count(accepted), "of them drafted"),
      figure(count(wasted), "drafted in vain"),
      figure(seconds(Math.max(0, sum((call) => call.speculation?.estimated_seconds_saved))), "saved (an estimate)")),
    timeline(calls),
    h("section", { "aria-label": "Calls" }, calls.map((call, at) => details(call, at, calls.length === 1))));
}

// What happened when: [name, kind, start, end, note] in seconds from the first call on.
export function happenings(calls) {
  const start = calls[0].at;
  return calls.flatMap((call, at) => {
    const [begun, ended] = [call.at - start, call.at - start + call.seconds];
    const first = begun + Math.min(call.first_token_seconds ?? 0, call.seconds);
    const { prompt_tokens: read, completion_tokens: written, prompt_tokens_details: known } = call.usage ?? {};
    const cached = known?.cached_tokens ? `, ${count(known.cached_tokens)} of them read before` : "";
    const rows = [
      [`${at + 1}. ${call.step || call.model || "call"}: waiting and reading`, "reading", begun, first, read ? `${count(read)} tokens${cached}` : ""],
      [`${at + 1}. writing`, "writing", first, ended, written ? `${count(written)} tokens` : ""],
    ];
    for (const [part, taken] of Object.entries(call.speculation?.seconds ?? {})) {
      if (typeof taken === "number") rows.push([`${at + 1}. in it: ${part}`, "part", begun, begun + Math.min(taken, call.seconds), ""]);
    }
    const next = calls[at + 1];
    if (next && next.at > call.at + call.seconds) {
      const tools = call.answers.flatMap((answer) => answer.tool_calls ?? []).map((tool) => tool.function?.name ?? tool.name ?? "tool");
      const name = tools.length ? `tools: ${tools.join(", ")}` : "the client";
      rows.push([name, tools.length ? "tools" : "client", ended, next.at - start, ""]);
    }
    return rows;
  });
}

function timeline(calls) {
  const rows = happenings(calls);
  const whole = Math.max(...rows.map(([, , , end]) => end), 1e-6);
  const shown = rows.map(([name, kind, start, end, note]) => {
    const bar = h("span", { class: `span ${kind}` });
    bar.style.marginLeft = `${(100 * start) / whole}%`;
    bar.style.width = `${(100 * (end - start)) / whole}%`;
    return [[h("bdi", {}, name), h("span", { class: "track" }, bar)], seconds(start), seconds(end - start), note];
  });
  return h("section", { class: "panel timeline" }, table(["What", "At", "Took", "Tokens"], shown, "Timeline"));
}

// A call; its answer is laid out once it is opened.
function details(call, at, open) {
  const { step, model, api, seconds: taken, speculation } = call;
  const about = [step, model, api && `/v1${api}`.replace("/v1/v1", "/v1"), seconds(taken)].filter(Boolean).join(" · ");
  const body = h("div", {});
  const made = h("details", { class: "panel", ontoggle: () => made.open && !body.firstChild && body.append(...contents(call)) },
    h("summary", {}, h("bdi", {}, `${at + 1}. ${about}`), speculation?.drafted ? ` · ${percent(speculation.accepted / speculation.drafted)} of drafts accepted` : ""),
    body);
  made.open = open;
  return made;
}

function contents(call) {
  const { speculation } = call;
  const shown = (value) => (typeof value !== "number" ? value : Number.isInteger(value) ? count(value) : value.toPrecision(3));
  const numbers = Object.entries(speculation ?? {}).flatMap(([name, value]) =>
    value && typeof value === "object" ? Object.entries(value).map(([part, one]) => [`${name}, ${part}`, one]) : [[name, value]])
    .filter(([, value]) => ["number", "string"].includes(typeof value));
  const parts = [
    ...call.messages.map((message) => plain(`${message.role ?? message.type ?? "message"} said`, textOfMessage(message))),
    ...call.answers.flatMap(answer),
  ];
  if (call.decisions?.length) parts.push(decisions(call.decisions));
  if (numbers.length) parts.push(table(["Speculation", "Count"], numbers.map(([name, value]) => [name.replaceAll("_", " "), shown(value)])));
  return parts;
}

function answer(one) {
  const thoughts = one.reasoning ?? one.reasoning_content;
  const shown = new Answer("Answer");
  const known = one.tokens?.some((token) => token.text);
  known ? shown.add(one.tokens) : shown.addText(one.text);
  return [
    thoughts && !(known && shown.element.textContent.includes(thoughts.trim())) ? plain("Thoughts", thoughts) : null,
    h("h2", {}, "Answer"),
    shown.element,
    known ? legend(one.tokens) : h("p", { class: "muted" }, "It is not known where these tokens came from: the text is not coloured."),
    ...(one.tool_calls ?? []).map((tool) => plain(`Calls ${tool.function?.name ?? tool.name ?? "a tool"}`, tool.function?.arguments ?? "")),
  ].filter(Boolean);
}

function plain(name, text) {
  const shown = new Answer(name);
  shown.addText(text);
  shown.element.classList.add("short");
  return h("div", {}, h("h2", { dir: "auto" }, name), shown.element);
}

function textOfMessage(message) {
  const content = message.content ?? message.output ?? message.text ?? "";
  if (typeof content === "string") return content;
  return Array.isArray(content) ? content.map((part) => part.text ?? `[${part.type}]`).join("\n") : JSON.stringify(content);
}

// What a strategy decided: a row for each step that stayed, with the verdict on its draft, and for each other event.
function decisions(records) {
  const rows = [];
  let verdict;
  for (const { event, at, step, rejected, ...rest } of records) {
    if (event === "scored") verdict = rest;
    if (event === "scored" || event === "proposed") continue;
    const said = Object.entries(rest).filter(([, value]) => value !== "").map(([name, value]) => `${name}: ${JSON.stringify(value)}`);
    const score = verdict ? `${Number(verdict.value).toFixed(1)} ${verdict.reason}` : "";
    const text = step ? [rejected && h("s", {}, rejected.text.trim()), rejected && "\n", step.text.trim()] : said.join("\n");
    rows.push([seconds(at), event, step ? `${step.author} model` : "", score, h("bdi", { class: "lines" }, text)]);
    verdict = undefined;
  }
  return table(["At", "Decision", "Written by", "Score", "Step"], rows, "Decisions of the strategy");
}
