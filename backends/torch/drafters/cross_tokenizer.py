"""Drafts from a small model with another tokenizer, translated through text.

The committed tokens are decoded and encoded again for the small model, and its draft is decoded and encoded in the
target's tokens. The draft is one path; answers stay exact, as with any other draft (the setting of OmniDraft,
Ramakrishnan et al. 2025, with text as the only link between the tokenizers).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from agentspec.backends.torch.drafters.base import Guess, StagedDrafter, make_draft, no_guess
from agentspec.backends.torch.drafters.draft_model import ModelDrafter
from agentspec.backends.torch.drafters.forwards import Drafting, draft_alone
from agentspec.backends.torch.text.tokenizer import TokenizerAdapter
from agentspec.types import Draft, Source

ANCHOR = 8  # committed tokens encoded again with a draft, so that its first tokens are as the target would write them
SETTLED = 64  # tokens at the end of the context whose translation may still change
OPEN = 256  # at most so many tokens are translated again in every call
UNFINISHED = "\ufffd"  # the character that decoding gives for an incomplete one


class TokenTranslation:
    """Translates a growing list of one tokenizer's ids into another's. Special tokens are left out."""

    def __init__(self, own: TokenizerAdapter, other: TokenizerAdapter) -> None:
        self._own, self._other = own, other
        self._ids: list[int] = other.encode("", special=True)  # a beginning-of-text token, if the model wants one
        self._open: list[int] = []
        self._read = 0

    def follow(self, context: Sequence[int]) -> list[int] | None:
        """The other model's ids of `context`, which extends that of earlier calls; None while it ends inside a
        character.
        """
        self._open += context[self._read :]
        self._read = len(context)
        if len(self._open) > OPEN:
            self._settle()
        text = self._own.decode(self._open)
        return None if text.endswith(UNFINISHED) else self._ids + self._other.encode(text)

    def _settle(self) -> None:
        """Translate all but the last tokens for good, up to a boundary between two characters."""
        for end in range(len(self._open) - SETTLED, 0, -1):
            text = self._own.decode(self._open[:end])
            if not text.endswith(UNFINISHED):
                self._ids += self._other.encode(text)
                del self._open[:end]
                return


class CrossTokenizerDrafter(StagedDrafter):
    """Translates between the target's tokens and the `inner` drafter's; `inner` must draft chains."""

    def __init__(self, inner: ModelDrafter, own: TokenizerAdapter, other: TokenizerAdapter) -> None:
        self._inner, self._own, self._other = inner, own, other
        self._transcript = TokenTranslation(own, other)

    def propose(self, context: Sequence[int], budget: int) -> Draft | None:
        return draft_alone(self.drafting(context, budget))

    def drafting(self, context: Sequence[int], budget: int, guess: Guess = no_guess) -> Drafting[Draft | None]:
        """`guess` is not used: it is in the target's tokens."""
        ids = self._transcript.follow(context)
        draft = (yield from self._inner.drafting(ids, budget)) if ids else None
        if ids is None or draft is None or not len(draft):
            return None
        pieces = self._pieces(ids[-ANCHOR:], draft.tokens.tolist())
        tokens = self._translated(context, "".join(pieces))[:budget]
        chances = self._chances(tokens, pieces, draft.probabilities.tolist())
        count = len(tokens)
        return make_draft(tokens, range(-1, count - 1), chances, [0] * count, [Source.MODEL] * count)

    def rest(self) -> None:
        self._inner.rest()

    def close(self) -> None:
        self._inner.close()

    def _pieces(self, before: list[int], drafted: list[int]) -> list[str]:
        """The text that each drafted token adds, before the first that changes earlier text or splits a character."""
        texts = [self._other.decode(before + drafted[:end]) for end in range(len(drafted) + 1)]
        pieces: list[str] = []
        for shorter, longer in pairwise(texts):
            if not longer.startswith(shorter) or UNFINISHED in longer[len(shorter) :]:
                break
            pieces.append(longer[len(shorter) :])
        return pieces

    def _translated(self, context: Sequence[int], text: str) -> list[int]:
        """`text` in the target's tokens, up to the first special token and without the last token, which more text
        could change.
        """
        anchor = [token for token in context[-ANCHOR:] if token not in self._own.special_ids]
        whole = self._own.encode(self._own.decode(anchor) + text)
        joined = whole[: len(anchor)] == anchor
        tokens = (whole[len(anchor) :] if joined else self._own.encode(text))[:-1]
        special = next((at for at, token in enumerate(tokens) if token in self._own.special_ids), len(tokens))
        return tokens[:special]

    def _chances(self, tokens: list[int], pieces: list[str], chances: list[float]) -> list[float]:
        """For each of the target's tokens, the draft's probability up to the drafted token in which its text ends."""
        ends: list[int] = []
        for piece in pieces:
            ends.append(len(piece) + (ends[-1] if ends else 0))
        lengths = (len(self._own.decode(tokens[: count + 1])) for count in range(len(tokens)))
        return [next((chances[at] for at, end in enumerate(ends) if end >= length), chances[-1]) for length in lengths]
