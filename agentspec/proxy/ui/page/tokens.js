// Shows an answer with every token coloured by where it came from. It is laid out in blocks, of which those near the
// screen have an element for each run of tokens of one source; the others are plain text until they are scrolled to.

import { count, h, percent } from "./dom.js";

export const SOURCES = {
  session: "this prompt and its session",
  shared: "earlier answers of this tenant",
  prediction: "the prediction that the request sent",
  grammar: "tokens that the required form forces",
  model: "the small model",
};
const OWN = "the model itself";
const BLOCK = 1000; // characters of one block, about 250 tokens; it ends with a line where it can
const LONGEST = 4 * BLOCK; // and here where no line ends

const sourceOf = (token) => (SOURCES[token.source] ? token.source : "");

// An answer to which tokens are added as they come.
export class Answer {
  constructor(label) {
    const on = { onpointerover: (event) => describe(event.target), onclick: (event) => unfold(event.target) };
    this.element = h("div", { class: "answer", role: "group", "aria-label": label, tabindex: "0", ...on });
    const seen = (blocks) => blocks.filter((one) => one.isIntersecting).forEach(({ target }) => {
      this.screen.unobserve(target);
      paint(target);
    });
    this.screen = new IntersectionObserver(seen, { root: this.element, rootMargin: "25%" });
    this.length = Infinity; // of the last block, in characters
    this.ended = true; // whether its last line has
  }

  add(tokens) {
    let text = "";
    const show = () => text && (this.block.coloured ? paint(this.block) : this.block.append(text));
    for (const token of tokens) {
      if (this.length > (this.ended ? BLOCK : LONGEST)) {
        show();
        const coloured = !this.block; // the first is on the screen
        this.block = Object.assign(h("bdi", { class: "block" }), { waiting: [], coloured });
        this.element.append(this.block);
        if (!coloured) this.screen.observe(this.block);
        [text, this.length] = ["", 0];
      }
      this.block.waiting.push(token);
      text += token.text;
      this.length += token.text.length;
      this.ended = token.text.endsWith("\n");
    }
    show();
  }

  // Text of unknown origin.
  addText(text) {
    this.add((text.match(/[^\n]{0,1000}\n?/g) ?? []).map((piece) => ({ text: piece, unknown: true })));
  }
}

// Puts the tokens that wait into elements, one for each run of tokens of one source.
function paint(block) {
  if (!block.coloured) block.replaceChildren();
  block.coloured = true;
  let text = "";
  for (const token of block.waiting.splice(0)) {
    const source = sourceOf(token);
    if (block.run?.source === source && !token.rejected?.length) {
      block.run.tokens.push(token);
      text += token.text;
    } else {
      if (text) block.node.data += text;
      [text, block.run] = ["", { source, tokens: [token] }];
      block.node = document.createTextNode(token.text);
      block.append(spanOf(block.run, block.node));
    }
  }
  if (text) block.node.data += text;
}

function spanOf(run, text) {
  const span = document.createElement("span");
  span.run = run;
  if (run.source) span.className = `token ${run.source}`;
  if (run.tokens[0].rejected?.length) span.append(markOf(run.tokens[0].rejected));
  span.append(text);
  return span;
}

const MARK = h("button", { type: "button", class: "mark", "aria-expanded": "false" });

function markOf(rejected) {
  const mark = MARK.cloneNode();
  mark.ariaLabel = `${rejected.length} rejected ${rejected.length === 1 ? "draft" : "drafts"}`;
  return mark;
}

// Shows the drafts that the model refused before a token, or hides them, if its mark was pressed.
function unfold(mark) {
  if (mark.className !== "mark") return;
  const shown = mark.ariaExpanded === "false";
  mark.ariaExpanded = String(shown);
  if (!shown) return mark.nextSibling.remove();
  mark.after(h("span", { class: "rejected" }, mark.parentNode.run.tokens[0].rejected.map((draft) =>
    h("span", {}, h("s", { class: `token ${sourceOf(draft)}`, dir: "auto" }, draft.text),
      ` ${SOURCES[draft.source] ?? draft.source}, ${percent(draft.probability)} `))));
}

// What is known of a run is written when somebody points at it: it costs nothing before.
function describe(target) {
  if (target.className === "mark") target.title = target.ariaLabel;
  const span = target.closest?.(".answer .block > span");
  if (!span?.run || span.run.tokens[0].unknown) return;
  const { source, tokens } = span.run;
  const known = tokens.filter((token) => token.probability !== undefined);
  const each = known.slice(0, 40).map((token) => `${JSON.stringify(token.text)} ${percent(token.probability)}`);
  const shown = each.length ? `\nprobability to be accepted, before the model checked it:\n${each.join("\n")}` : "";
  span.title = `${tokens.length === 1 ? "1 token" : `${tokens.length} tokens`} from ${SOURCES[source] ?? OWN}${shown}`;
}

// How many tokens each source gave, as a legend and as text.
export function legend(tokens) {
  const counts = {};
  for (const token of tokens) {
    const source = sourceOf(token);
    counts[source] = (counts[source] ?? 0) + 1;
  }
  const entries = Object.entries(counts).sort(([, one], [, other]) => other - one);
  return h("ul", { class: "legend", "aria-label": "Tokens by source" },
    entries.map(([source, tokens_]) =>
      h("li", {}, h("span", { class: `swatch token ${source}` }), ` ${SOURCES[source] ?? OWN}: ${count(tokens_)}`)));
}
