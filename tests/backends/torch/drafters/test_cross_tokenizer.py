"""Between two tokenizers nothing is proposed that the target would not write, and texts survive the crossing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agentspec.backends.torch.drafters.base import Drafter, chain_draft
from agentspec.backends.torch.drafters.draft_model import OPEN, CrossTokenizerDrafter, TokenTranslation
from agentspec.backends.torch.text.tokenizer import TokenizerAdapter
from agentspec.types import Draft, Source

TEXT = (
    "def area(radius):\n    pi = 3.14159\n    return pi * radius * radius\n\n"
    "The quick brown fox, zażółć gęślą 你好 🙂!\n"
)


def trained(vocab: int) -> TokenizerAdapter:
    """A byte-level BPE tokenizer of its own, with an end and a role marker."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=["<|end|>", "<|user|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator([TEXT] * 50, trainer)
    return TokenizerAdapter(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>"))


OWN, OTHER = trained(300), trained(330)


class Knowing(Drafter):
    """An inner drafter that goes on with a known text in the other tokens."""

    def __init__(self, text: str, count: int = 8) -> None:
        self.ids, self.count, self.closed, self.seen = OTHER.encode(text), count, False, list[int]()

    def propose(self, context: Sequence[int], budget: int) -> Draft:
        self.seen = list(context)
        rest = self.ids[len(context) :][: min(budget, self.count)]
        return chain_draft(rest, 0.9, Source.MODEL)

    def close(self) -> None:
        self.closed = True


def bridge(text: str, **options: Any) -> CrossTokenizerDrafter:
    return CrossTokenizerDrafter(Knowing(text, **options), OWN, OTHER)  # type: ignore[arg-type]


def test_drafted_tokens_are_those_of_the_targets_own_encoding() -> None:
    """At every token of the text: the draft is a piece of the target's own encoding, wherever both tokens end."""
    whole, drafted = OWN.encode(TEXT), 0
    drafter = bridge(TEXT)
    for end in range(1, len(whole)):
        draft = drafter.propose(whole[:end], 12)
        text = OWN.decode(whole[:end])
        if draft is None or OTHER.encode(text) != OTHER.encode(TEXT)[: len(OTHER.encode(text))]:
            continue  # the other tokenizer joins what comes next with what is there
        tokens = draft.tokens.tolist()
        assert tokens == whole[end : end + len(tokens)]
        assert set(draft.source.tolist()) <= {Source.MODEL} and len(tokens) <= 12
        drafted += len(tokens)
    assert drafted > len(whole)


@given(st.lists(st.integers(0, 299), min_size=1, max_size=40), st.lists(st.integers(0, 329), max_size=8))
def test_any_ids_on_either_side_are_survived(context: list[int], drafted: list[int]) -> None:
    class Any_(Knowing):
        def propose(self, context: Sequence[int], budget: int) -> Draft:
            return chain_draft(drafted[:budget], 0.8, Source.MODEL)

    draft = CrossTokenizerDrafter(Any_(""), OWN, OTHER).propose(context, 6)  # type: ignore[arg-type]
    if draft is not None:
        assert len(draft) <= 6 and not OWN.special_ids.intersection(draft.tokens.tolist())
        assert all(a >= b for a, b in zip(draft.probabilities, draft.probabilities[1:], strict=False))


def test_an_incomplete_character_gives_no_draft() -> None:
    smile = OWN.encode("🙂")
    assert len(smile) > 1
    drafter = bridge("🙂 area")
    assert drafter.propose(smile[:1], 8) is None
    assert drafter.propose(smile, 8) is not None


def random_text(rng: random.Random, count: int) -> str:
    letters = "ab \n.é你🙂ż{}" + chr(0x1F600)
    return "".join(rng.choice(letters) for _ in range(count))


@pytest.mark.parametrize("seed", range(5))
def test_a_translation_decodes_to_the_same_text(seed: int) -> None:
    """Translated piece by piece, as the context grows, the other ids still decode to the whole text."""
    rng = random.Random(seed)
    text = random_text(rng, 3 * OPEN)
    ids, transcript, end = OWN.encode(text), TokenTranslation(OWN, OTHER), 0
    while end < len(ids):
        end = min(len(ids), end + rng.randrange(1, 90))
        translated = transcript.follow(ids[:end])
        if translated is not None:
            assert OTHER.decode(translated) == OWN.decode(ids[:end])
    assert len(transcript._open) <= OPEN
