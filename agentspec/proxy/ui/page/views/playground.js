// One prompt, answered with speculation off and then on: side by side, each with its clock, and compared at the end.

import { events, getJson } from "../api.js";
import { count, figure, h, percent, seconds } from "../dom.js";
import { Answer, legend } from "../tokens.js";

export const title = "Playground";
export const needs = "uses_models";

const METHODS = [["push", ", item", "append(item)"], ["pop", "", "pop()"], ["clear", "", "clear()"], ["copy", "", "copy()"]];
const CODE = ["class Stack:\n    def __init__(self):\n        self.items = []\n",
  ...METHODS.map(([name, more, does]) => `    def ${name}(self${more}):\n        return self.items.${does}\n`)].join("\n");
const EXAMPLES = {
  "Edit code": `Rename items to values in the code below. Return the whole code.\n\n${CODE}`,
  "Free text": "Write a short story about a lighthouse.",
};
const MODES = { off: "Speculation off", on: "Speculation on" };

export async function show(main, { session, signal }) {
  const models = await modelsOf(session, main, signal);
  const field = {
    prompt: h("textarea", { id: "prompt", required: true }),
    example: h("select", { id: "example" }, Object.keys(EXAMPLES).map((name) => h("option", {}, name))),
    model: h("select", { id: "model" }, models.map((one) => h("option", {}, one.name))),
    most: h("input", { id: "most", type: "number", min: "1", max: "4096", value: "200", required: true }),
    temperature: h("input", { id: "temperature", type: "number", min: "0", max: "2", step: "0.1", value: "0", required: true }),
  };
  const pick = () => (field.prompt.value = EXAMPLES[field.example.value]);
  field.example.addEventListener("change", pick);
  pick();
  const labelled = (name, text) => h("div", {}, h("label", { for: name }, text), field[name]);
  const run = h("button", { type: "submit" }, "Answer twice");
  const verdict = h("p", { role: "status", class: "verdict" });
  const result = h("div", { class: "sides" });
  const form = h("form", { class: "panel" },
    labelled("prompt", "Prompt"),
    h("div", { class: "row" },
      labelled("example", "Example"), labelled("model", "Model"), labelled("most", "Most tokens"),
      labelled("temperature", "Temperature"), run),
    h("p", { class: "muted" },
      "The prompt is answered with speculation off, then with it on, one after the other, so that neither slows the other ",
      "down. Of the first answer nothing is stored, or the second could be drafted from it. The second is: answer the same ",
      "prompt again, and most of it comes from that earlier answer."));
  let stop = new AbortController();
  signal.addEventListener("abort", () => stop.abort());
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    stop.abort();
    stop = new AbortController();
    const mine = stop.signal;
    run.disabled = true;
    try {
      const model = models.find((one) => one.name === field.model.value);
      const asked = { model, prompt: field.prompt.value, most: Number(field.most.value), temperature: Number(field.temperature.value) };
      await compare(asked, result, verdict, mine);
    } catch (error) {
      if (!mine.aborted) verdict.replaceChildren(h("span", { class: "bad" }, error.message));
    } finally {
      run.disabled = false;
    }
  });
  main.append(h("h1", {}, title), form, verdict, result);
}

// The models, once they are loaded; an upstream without a list of its own is asked for one.
async function modelsOf(session, main, signal) {
  let { models, ready } = session;
  const waiting = h("p", { role: "status" }, "The models are still loading …");
  while (!ready && !signal.aborted) {
    main.replaceChildren(waiting);
    await new Promise((resolve) => setTimeout(resolve, 1000));
    ({ models, ready } = await getJson("/ui/data/session", { signal }));
  }
  waiting.remove();
  if (models.length) return models;
  return (await getJson("/v1/models", { signal })).data.map((one) => ({ name: one.id, local: false }));
}

async function compare(asked, result, verdict, signal) {
  const sides = Object.fromEntries(Object.entries(MODES).map(([mode, text]) => [mode, new Side(text)]));
  result.replaceChildren(...Object.values(sides).map((side) => side.element));
  verdict.replaceChildren("Warming up with one token …");
  await getJson("/v1/chat/completions", { method: "POST", body: { ...bodyOf(asked), max_tokens: 1 }, signal, headers: headersOf("off") });
  for (const [mode, side] of Object.entries(sides)) {
    verdict.replaceChildren(`${MODES[mode]}: answering …`);
    await side.answer(asked, mode, signal);
  }
  verdict.replaceChildren(...judged(sides.off, sides.on));
}

const bodyOf = ({ model, prompt, most, temperature }) => ({
  model: model.name, messages: [{ role: "user", content: prompt }], max_tokens: most, temperature, seed: 1,
});

const headersOf = (mode) => ({
  "x-agentspec-workflow": "playground",
  "x-agentspec-step": "playground",
  ...(mode === "off" ? { "x-agentspec-speculation": "off", "x-agentspec-store": "off" } : {}),
});

// Whether both answers are the same, by token ids where the server sends them, and how much sooner the second came.
function judged(off, on) {
  const byIds = off.ids.length > 0 && on.ids.length > 0;
  const [one, other] = byIds ? [off.ids, on.ids] : [[...off.text], [...on.text]];
  const unit = byIds ? "token" : "character";
  const differs = one.findIndex((item, at) => item !== other[at]);
  const same = one.length === other.length && differs < 0;
  const at = differs < 0 ? Math.min(one.length, other.length) : differs;
  const faster = on.speed / off.speed;
  return [
    same
      ? h("strong", { class: "good" }, `Identical: all ${count(one.length)} ${unit}s are the same.`)
      : h("strong", { class: "bad" }, `Not identical: they part at ${unit} ${count(at + 1)}. A near-tie between two tokens can fall either way; agentspec verify checks whether it was one.`),
    Number.isFinite(faster) ? ` With speculation ${faster.toFixed(2)} times the tokens a second.` : "",
  ];
}

// One of the two answers, with its clock.
class Side {
  constructor(name) {
    this.ids = [];
    this.text = "";
    this.tokens = [];
    this.counted = 0;
    this.shown = new Answer(name);
    this.figures = h("div", { class: "row" });
    this.notes = h("div", {});
    this.element = h("section", { class: "panel" }, h("h2", {}, name), this.figures, this.shown.element, this.notes);
    this.tick();
  }

  // Tokens a second after the first ones, which wait for the prompt to be read.
  get speed() {
    const passed = (this.end ?? performance.now()) - this.first;
    return passed > 0 ? (1000 * (this.counted - this.atFirst)) / passed : NaN;
  }

  async answer(asked, mode, signal) {
    const wanted = { return_token_ids: true, ...(asked.model.local ? { return_token_sources: true } : {}) };
    const body = { ...bodyOf(asked), ...wanted, stream: true, stream_options: { include_usage: true } };
    this.began = performance.now();
    const clock = setInterval(() => this.tick(), 100);
    try {
      for await (const chunk of events("/v1/chat/completions", { body, signal, headers: headersOf(mode) })) this.take(chunk);
    } finally {
      clearInterval(clock);
      this.end = this.last ?? performance.now();
      this.tick();
    }
    this.conclude();
  }

  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    this.usage = chunk.usage ?? this.usage;
    this.speculation = chunk.speculation ?? this.speculation;
    const [choice] = chunk.choices ?? [];
    if (!choice) return;
    const ids = choice.token_ids ?? [];
    const text = choice.delta?.content ?? "";
    this.ids.push(...ids);
    this.text += text;
    if (!text && !ids.length) return;
    this.counted += ids.length || 1;
    this.last = performance.now();
    if (this.first === undefined) [this.first, this.atFirst] = [this.last, this.counted];
    if (choice.token_sources?.length) {
      this.tokens.push(...choice.token_sources);
      this.shown.add(choice.token_sources);
    } else {
      this.shown.addText(text);
    }
  }

  tick() {
    const passed = this.began === undefined ? 0 : (this.end ?? performance.now()) - this.began;
    this.figures.replaceChildren(
      figure(seconds(passed / 1000), "clock"),
      figure(Number.isFinite(this.speed) ? count(this.speed) : "–", "tokens/s"),
      figure(count(this.usage?.completion_tokens ?? this.counted), "tokens"),
      figure(this.first === undefined ? "–" : seconds((this.first - this.began) / 1000), "to the first"));
  }

  conclude() {
    const { accepted, drafted, steps } = this.speculation ?? {};
    const tokens = this.usage?.completion_tokens ?? this.counted;
    const counts = accepted === undefined
      ? "One token for each forward of the model."
      : `${count(tokens)} tokens in ${count(steps)} forwards; ${count(accepted)} of ${count(drafted)} drafted tokens were accepted` +
        (drafted ? ` (${percent(accepted / drafted)}).` : ".");
    const read = this.usage?.prompt_tokens_details?.cached_tokens;
    this.notes.replaceChildren(
      this.tokens.length ? legend(this.tokens) : h("p", { class: "muted" }, "It is not known where these tokens came from: the text is not coloured."),
      h("p", { class: "muted" }, counts, read ? ` ${count(read)} tokens of the prompt had been read before.` : ""));
  }
}
