"""Every guard of exactness is needed: with any one of them broken, the comparison with the oracle fails.

A mutation names a function or method and one expression or statement of it, both of which have to be there.
`make mutants` breaks one after the other; the batteries themselves run every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from agentspec.backends.torch.grammars.grammar import GrammarCompiler
from agentspec.backends.torch.sampling.constraints import ConstraintSpec
from agentspec.errors import EngineError, InvalidRequestError
from agentspec.types import SamplingParams
from tests.backends.torch.conftest import Ask, EagerGovernor, laboratory, tree_of

PROMPT = [72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100]
LENGTH = 36
END = 256
SAMPLINGS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.5, seed=3),
    SamplingParams(temperature=0.9, top_p=0.9, frequency_penalty=1.5, repetition_penalty=1.4, seed=4),
)

# function or method, what to change, changed
Mutations = dict[str, tuple[str, str, str]]
MUTATIONS: Mutations = {
    "siblings see each other": ("tree_layout", "sees[row] = sees[above]", "pass"),
    "positions are columns": ("tree_layout", "depths[row] = depths[above] + 1", "depths[row] = row"),
    "window one wider": ("attention_mask", "<= positions[:, None] - window", "< positions[:, None] - window"),
    "window between columns": ("attention_mask", "torch.arange(first, past, device=device), positions]",
        "torch.arange(past + size, device=device)[first:]]"),
    "no compaction": ("SequenceCache.commit", "self._gather(", "("),
    "rejected rows kept": ("SequenceCache.commit", "start + len(path)", "start + len(path) + 1"),
    "accepted rows forgotten": ("SequenceCache.commit", "start + len(path)", "start"),
    "noise by call, not by position": ("Sampler.observe", "self._position += 1", "pass"),
    "history not kept": ("Penalties.observe", "self._counts[token] += 1", "pass"),
    "noise by path alone": ("Sampler._draw", "self._position + len(path)) for", "len(path)) for"),
    "seed ignored": ("Sampler._draw", "position_key(self.seed, self._choice,", "position_key(0, self._choice,"),
    "child of any parent": ("accept_path", "drafted.get(token)",
        "next((n for one in children.values() for t, n in one.items() if t == token), None)"),
    "first child always": ("accept_path", "drafted.get(token)", "next(iter(drafted.values()), None)"),
    "goes on past the end": ("accept_path", "if emit(token, row) or", "if (emit(token, row) and False) or"),
    "row of the parent": ("accept_path", "token = choose(row)", "token = choose(max(node, 0))"),
    "illegal ids pass": ("usable", "0 <= token < vocab_size", "True"),
}  # fmt: skip
BATCH_MUTATIONS: Mutations = {
    "positions of the first sequence": ("PackedCache.__init__", "past + layout.depths", "pasts[0] + layout.depths"),
    "one sequence's window for all": ("_view", "firsts = [first_visible(past, window) for past in pasts]",
        "firsts = [first_visible(min(pasts), window) for past in pasts]"),
    "a window's last row is cut off": ("first_visible", "past - window + 1", "past - window + 2"),
    "two tokens without a mask": ("_view", "len(layout) == 1", "len(layout) <= 2"),
    "logits of the row before": ("logit_rows", "np.arange(end - item.outputs, end)",
        "np.arange(end - item.outputs, end) - 1"),
    "all rows in the first sequence": ("PackedCache.update", "all_keys, all_values = cache.update(",
        "all_keys, all_values = self._caches[0].update("),
    "one sequence's values for all": ("Ragged.attend", "zip(queries, self.keys, self.values,",
        "zip(queries, self.keys, [self.values[0]] * len(self.keys),"),
    "queries out of order": ("Ragged.attend", "torch.cat(parts, dim=1)", "torch.cat(parts[::-1], dim=1)"),
    "rows lost in growing": ("_room", "room[:, :, :length] = rows[:, :, :length]", "pass"),
    "a prompt's chunk draws": ("plan_step", "draws=tokens == uncomputed", "draws=True"),
    "logits of another sequence": ("run_forward", "zip(scheduled, target.forward_batch(items), strict=True)",
        "zip(scheduled, target.forward_batch(items)[::-1], strict=True)"),
    "rows of a chunk kept twice": ("Sequence.commit_chunk", "self.kv_cache.commit(count, ())",
        "self.kv_cache.commit(count + 1, ())"),
}  # fmt: skip
# The same for what a request's rules bar.
RULE_MUTATIONS: Mutations = {
    "grammar not advanced": ("GrammarMatcher.advance", "self._try(lambda matcher: matcher.consume_token(token))",
        "pass"),
    "mask not applied": ("Sampler.choose", "self._allowed(row)[None]", "self._logits[row][None]"),
    "best token taken unasked": ("Sampler.choose", " and (self._free or self._holds(self.drawn[row]))", ""),
    "rules do not hear of tokens": ("Sampler.observe", "self.constraints.observe(token)", "pass"),
    "end allowed one token early": ("Constraints._barred", "self._count < self._early",
        "self._count + 1 < self._early"),
    "history of bad words not kept": ("Constraints.observe", "self._recent = [*self._recent, token][-self._longest:]",
        "pass"),
    "choices share their noise": ("Sampler._draw", "position_key(self.seed, self._choice,",
        "position_key(self.seed, 0,"),
}  # fmt: skip
# The same where the tokens of all rows are drawn before one is asked for.
AHEAD_MUTATIONS: Mutations = {
    "one noise for all rows": ("Sampler._draw", "_position + len(path)) for", "_position) for"),
    "drafted ancestors not counted": ("Penalties._counts_along",
        "places = [row * size + token for row, path in enumerate(paths) for token in path]", "places = []"),
    "ancestors counted in another row": ("Penalties._counts_along", "row * size + token",
        "(len(paths) - 1 - row) * size + token"),
    "paths end at the parent": ("ancestor_tokens", "(*paths[parent + 1], token)", "paths[parent + 1]"),
    "paths from the node before": ("ancestor_tokens", "paths[parent + 1]", "paths[-1]"),
    "tokens of another answer": ("fetch", "list(islice(tokens, len(pending)))", "list(tokens)"),
}  # fmt: skip


ALL = {"alone": MUTATIONS, "batch": BATCH_MUTATIONS, "rules": RULE_MUTATIONS, "ahead": AHEAD_MUTATIONS}


@pytest.fixture(scope="module")
def labs() -> list[Any]:
    return [laboratory("llama"), laboratory("gemma3")]


def battery(labs: list[Any]) -> None:
    """A short version of the exactness tests; raises when an answer is wrong."""
    for lab in labs:
        for sampling in SAMPLINGS:
            longer = lab.oracle(PROMPT, sampling, max_tokens=LENGTH + 8, stop_ids=())
            for script in scripts(longer):
                got = lab.run(PROMPT, sampling, script, max_tokens=LENGTH, stop_ids=())
                lab.require_same(PROMPT, sampling, got.tokens, longer[:LENGTH])
            end = longer[LENGTH // 2]
            got = lab.run(PROMPT, sampling, scripts(longer)[0], max_tokens=LENGTH, stop_ids=[end])
            lab.require_same(PROMPT, sampling, got.tokens, longer[: longer.index(end) + 1])


def batch_battery(labs: list[Any], governor: Any) -> None:
    """Answers of different lengths together, prompts read in small chunks; raises when one of them is wrong."""
    for lab in labs:
        asks, wants = [], []
        for index, sampling in enumerate((*SAMPLINGS, *SAMPLINGS)):
            prompt = [*PROMPT[index:], *range(index * 4)]
            want = lab.oracle(prompt, sampling, max_tokens=10 + index, stop_ids=())
            winding, *_, next_one = scripts(want, prompt)
            script = (winding, None, next_one)[index % 3]
            asks.append(Ask(prompt, sampling, script, max_tokens=10 + index, stop_ids=()))
            wants.append(want)
        for ask, outcome, want in zip(asks, lab.run_batch(asks, governor=governor), wants, strict=True):
            lab.require_same(ask.prompt, ask.sampling, outcome.tokens, want)


def scripts(want: list[int], prompt: list[int] = PROMPT) -> list[Any]:
    whole = [*prompt, *want]

    def winding(text: list[int], budget: int) -> Any:
        """The right path behind wrong siblings and wrong children."""
        rest = whole[len(text) : len(text) + 9]
        tokens, parents, last = [], [], -1
        for token in rest:
            tokens += [(token + 1) % 256, (token + 2) % 256, token]
            parents += [last, len(tokens) - 3, last]
            last = len(tokens) - 1
        return tree_of(tokens, parents)

    def wrong(text: list[int], budget: int) -> Any:
        return tree_of([(token + 1) % 256 for token in whole[len(text) : len(text) + 3]], [-1, 0, 1])

    def illegal(text: list[int], budget: int) -> Any:
        follow = [*whole[len(text) : len(text) + 2], 65, 65]
        return tree_of([-1, 10**6, follow[1], follow[0]], [-1, -1, 1, -1])

    def shifted(text: list[int], budget: int) -> Any:
        """The right tokens under the wrong parents."""
        rest = whole[len(text) : len(text) + 3]
        return tree_of([*rest[1:], *rest], [-1, -1, 1, 1, 1])

    def next_one(text: list[int], budget: int) -> Any:
        return tree_of(whole[len(text) : len(text) + 1], [-1] * (len(text) < len(whole)))

    return [winding, wrong, illegal, shifted, next_one]


def rule_battery(lab: Any, grammars: Any) -> None:
    """A short version of the tests with rules: a grammar, a bad word, a shortest length, a second choice."""
    words = grammars.compile("start: /[a-c]{12,30}/", param="p")
    letters = [grammars._tokenizer.encode(letter)[0] for letter in "abc"]
    bad = (letters[0], letters[1])

    def allowed(answer: Sequence[int]) -> list[int]:
        free = [token for token in letters if (*answer[-1:], token) != bad]
        return free if len(answer) < 15 else [*free, END]

    for sampling in SAMPLINGS:
        shortest = replace(sampling, min_tokens=15)
        want = lab.oracle(PROMPT, shortest, max_tokens=20, allowed=allowed, choice=1)
        for script in scripts(want)[:2]:
            rules = ConstraintSpec(words, (bad,), choice=1)
            got = lab.run(PROMPT, shortest, script, max_tokens=20, constraints=rules)
            assert got.tokens == want
        eager = replace(sampling, min_tokens=5, logit_bias={END: 100.0})
        assert len(lab.run(PROMPT, eager, scripts(want)[0], max_tokens=20).tokens) == 6


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, table in ALL.items() for name in table])
def test_every_mutation_finds_its_place(mutate: Any, kind: str, name: str) -> None:
    mutate(*ALL[kind][name])


@pytest.fixture(scope="module")
def grammars(byte_tokens: Any) -> Any:
    return GrammarCompiler(byte_tokens, 259, [END])


@pytest.fixture
def play(labs: list[Any], lab: Any, grammars: Any) -> Any:
    """Runs the batteries that a kind of mutation concerns; raises when an answer is wrong."""
    governor = EagerGovernor()  # verifies everything and reads prompts in small pieces
    governor.chunk = lambda *step: 7

    def run(kind: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for one in labs if kind == "ahead" else ():
                patch.setattr(one, "draws_ahead", True)
            if kind in ("alone", "ahead"):
                battery(labs)
            if kind in ("batch", "ahead"):
                batch_battery(labs, governor)
            if kind == "rules":
                rule_battery(lab, grammars)

    return run


@pytest.mark.parametrize(
    "kind", ["batch", "rules", *(pytest.param(kind, marks=pytest.mark.mutants) for kind in ("alone", "ahead"))]
)
def test_the_batteries_pass_without_a_mutation(play: Any, kind: str) -> None:
    play(kind)


@pytest.mark.mutants
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, table in ALL.items() for name in table])
def test_a_broken_guard_is_caught(play: Any, mutate: Any, kind: str, name: str) -> None:
    mutate(*ALL[kind][name])
    with pytest.raises((AssertionError, IndexError, RuntimeError, TypeError, EngineError, InvalidRequestError)):
        play(kind)
