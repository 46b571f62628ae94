"""Where each token of an answer came from: recorded for requests that ask for it, and not imported for others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from agentspec.backends.torch.engine.speculator import Proposal
from agentspec.types import Delta, RejectedDraft, Source, TokenSource


class TokenOrigins:
    """The sources of one answer's tokens. Joined, their texts are the answer's text.

    `spell` writes out one token. Text can be held back, as it may begin a stop string: its tokens wait here.
    """

    def __init__(self, spell: Callable[[int], str]) -> None:
        self.pieces: list[str] = []  # the texts of the tokens of this forward
        self._spell = spell
        self._waiting: deque[TokenSource] = deque()
        self._passed = 0  # characters of the tokens that wait which the answer has already
        self._forward = 0

    def traced(self, delta: Delta, draft: Proposal, path: Sequence[int]) -> Delta:
        """The delta of one forward, in which the nodes of `path` were accepted, with the sources of its tokens."""
        for place, text in enumerate(self.pieces):
            node = path[place] if place < len(path) else None
            source = None if node is None else Source.NAMES[draft.sources[node]]
            probability = None if node is None else round(draft.acceptance[node], 4)
            rejected = tuple(self._rejected(draft, path, place, delta.token_ids[place]))
            self._waiting.append(TokenSource(text, source, probability, rejected, self._forward))
        self.pieces.clear()
        self._forward += 1
        return replace(delta, token_sources=self._take(delta.text, ended=delta.finish_reason is not None))

    def _take(self, text: str, *, ended: bool) -> tuple[TokenSource, ...]:
        """The tokens that are whole in the answer once `text` was added to it; those that wait, if it `ended`."""
        self._passed += len(text)
        taken: list[TokenSource] = []
        while self._waiting and (ended or len(self._waiting[0].text) <= self._passed):
            one = self._waiting.popleft()
            taken.append(replace(one, text=one.text[: self._passed]))  # a stop string cuts the last ones
            self._passed -= len(taken[-1].text)
        if ended and self._passed:  # an incomplete character, which no token completes
            taken[-1] = replace(taken[-1], text=taken[-1].text + text[-self._passed :])
        return tuple(taken)

    def _rejected(self, draft: Proposal, path: Sequence[int], place: int, written: int) -> Iterator[RejectedDraft]:
        """The drafts for the token at `place`, which became another one."""
        before = path[place - 1] if place else -1
        for node, parent in enumerate(draft.parents):
            if parent == before and draft.tokens[node] != written:
                text = "".join(self._spell(draft.tokens[one]) for one in _likeliest(draft, node))
                yield RejectedDraft(text, Source.NAMES[draft.sources[node]], round(draft.acceptance[node], 4))


def _likeliest(draft: Proposal, node: int | None) -> Iterator[int]:
    """`node`, its likeliest child, and so on."""
    while node is not None:
        yield node
        children = [one for one, parent in enumerate(draft.parents) if parent == node]
        node = max(children, key=draft.acceptance.__getitem__, default=None)
