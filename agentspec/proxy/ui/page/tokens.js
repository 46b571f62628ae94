// Shows an answer with every token coloured by where it came from. Neighbours of one source share an element, and
// those of a long answer are laid out only while they are on the screen.

import { count, h, percent } from "./dom.js";

export const SOURCES = {
  session: "this prompt and its session",
  shared: "earlier answers of this tenant",
  prediction: "the prediction that the request sent",
  grammar: "tokens that the required form forces",
  model: "the small model",
};
const OWN = "the model itself";
const BLOCK = 2000; // characters of one block, which is laid out as a whole; it ends with a line where it can
const LONGEST = 4 * BLOCK; // and here where no line ends

const sourceOf = (token) => (SOURCES[token.source] ? token.source : "");

// An answer to which tokens are added as they come.
export class Answer {
  constructor(label) {
    this.element = h("div", { class: "answer", role: "group", "aria-label": label, tabindex: "0" });
    this.element.addEventListener("pointerover", (event) => describe(event.target));
    this.length = Infinity; // of the last block, in characters
    this.ended = true; // whether its last line has
  }

  add(tokens, known = true) {
    let text = "";
    for (const token of tokens) {
      const source = sourceOf(token);
      if (this.length > (this.ended ? BLOCK : LONGEST)) {
        if (text) this.node.data += text;
        [text, this.run, this.length] = ["", null, 0];
        this.block = h("bdi", { class: "block" });
        this.element.append(this.block);
      }
      if (this.run?.source === source && !token.rejected?.length) {
        this.run.tokens.push(token);
        text += token.text;
      } else {
        if (text) this.node.data += text;
        [text, this.run] = ["", { source, known, tokens: [token] }];
        this.node = document.createTextNode(token.text);
        this.block.append(spanOf(this.run, this.node));
      }
      this.length += token.text.length;
      this.ended = token.text.endsWith("\n");
    }
    if (text) this.node.data += text;
  }

  // Text of unknown origin.
  addText(text) {
    this.add((text.match(/[^\n]{0,2000}\n?/g) ?? []).map((piece) => ({ text: piece })), false);
  }
}

function spanOf(run, text) {
  const span = run.tokens[0].rejected?.length ? rejection(run, text) : h("span", {}, text);
  span.run = run;
  if (run.source) span.classList.add("token", run.source);
  return span;
}

// The drafts that the model refused before this token, shown once the mark is pressed.
function rejection(run, text) {
  const { rejected } = run.tokens[0];
  const label = `${rejected.length} rejected ${rejected.length === 1 ? "draft" : "drafts"}`;
  const mark = h("button", { type: "button", class: "mark", "aria-expanded": "false", "aria-label": label, title: label }, "▾");
  const list = h("span", { class: "rejected", hidden: true });
  mark.onclick = () => {
    list.hidden = !list.hidden;
    mark.setAttribute("aria-expanded", String(!list.hidden));
    if (list.childElementCount) return;
    list.append(...rejected.map((draft) =>
      h("span", {}, h("s", { class: `token ${sourceOf(draft)}`, dir: "auto" }, draft.text),
        ` ${SOURCES[draft.source] ?? draft.source}, ${percent(draft.probability)} `)));
  };
  return h("span", {}, mark, list, text);
}

// What is known of a run is written when somebody points at it: it costs nothing before.
function describe(target) {
  const span = target.closest?.(".answer .block > span");
  if (!span?.run?.known) return;
  const { source, tokens } = span.run;
  const known = tokens.filter((token) => token.probability !== undefined);
  const each = known.slice(0, 40).map((token) => `${JSON.stringify(token.text)} ${percent(token.probability)}`);
  const shown = each.length ? `\nprobability to be accepted, before the model checked it:\n${each.join("\n")}` : "";
  span.title = `${tokens.length === 1 ? "1 token" : `${tokens.length} tokens`} from ${SOURCES[source] ?? OWN}${shown}`;
}

// How many tokens each source gave, as a legend and as text.
export function legend(tokens) {
  const counts = {};
  for (const token of tokens) counts[sourceOf(token)] = (counts[sourceOf(token)] ?? 0) + 1;
  const entries = Object.entries(counts).sort(([, one], [, other]) => other - one);
  return h("ul", { class: "legend", "aria-label": "Tokens by source" },
    entries.map(([source, tokens_]) =>
      h("li", {}, h("span", { class: `swatch token ${source}` }), ` ${SOURCES[source] ?? OWN}: ${count(tokens_)}`)));
}
