"""Drafts from a small model that reads the same token ids as the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

from agentspec.backends.torch.drafters.base import MIN_PROBABILITY, Drafter, make_draft
from agentspec.backends.torch.drafters.forwards import DraftForward, Drafting, DraftLogits, draft_alone
from agentspec.backends.torch.drafters.shared_noise import SharedNoiseSampler
from agentspec.backends.torch.model.batch import BatchItem
from agentspec.backends.torch.model.kv_cache import SequenceCache
from agentspec.backends.torch.model.target import TargetModel
from agentspec.types import Draft, Source

CHUNK = 256  # tokens read per call until the model has caught up, so that a long prompt does not stall other answers
BEHIND = 32  # with at most so many unread tokens, the model reads them and drafts in the same call
WIDTH = 3  # candidates per position: the draft goes on from the most likely one, the others are leaves

Least = Callable[[float, int], float]
Room = Callable[[], int | None]


class ModelDrafter(Drafter):
    """Drafts a path of the model's own draws, one forward per token, with the next best candidates as leaves beside it.

    It keeps KV slots of its own for one answer and, at each call, rewinds those of tokens that the target did not
    accept. The path ends where its probability falls below `least(seconds, context)`, the probability that makes one
    more forward of `seconds` worth its time. All answers of the engine's thread share the model, and its forwards.
    `room()` is the most slots that it may keep (None: any number); with fewer than it needs it drafts nothing.
    """

    def __init__(
        self,
        model: TargetModel,
        sampler: SharedNoiseSampler,
        least: Least,
        *,
        width: int = WIDTH,
        room: Room = lambda: None,
    ) -> None:
        cache = model.new_cache(1)
        assert isinstance(cache, SequenceCache), "a draft model must be rewindable"
        self._model, self._sampler, self._least, self._width = model, sampler, least, width
        self._room = room
        self._cache = cache
        self._known: list[int] = []  # the tokens of the KV slots
        self._settled = 0

    def propose(self, context: Sequence[int], budget: int) -> Draft | None:
        return draft_alone(self.drafting(context, budget))

    def drafting(self, context: Sequence[int], budget: int) -> Drafting[Draft | None]:
        if budget <= 0 or len(context) + budget > self._model.context_length:
            return None
        room = self._room()
        if room is not None and len(context) + budget > room:
            budget = room - len(context)
            if budget <= 0:
                self.rest()
                return None
        self._follow(context)
        self._cache.reserve(len(context) + budget, room)
        waiting = list(context[self._cache.length :])
        if max(waiting) >= self._model.vocab_size:  # same tokenizer, but fewer embeddings
            return None
        if len(waiting) > BEHIND:
            yield from self._read(waiting[:CHUNK], needs_logits=False)
            return None
        return (yield from self._grow(waiting, len(context), budget))

    def rest(self) -> None:
        self._cache, self._known, self._settled = SequenceCache(1), [], 0

    def close(self) -> None:
        self.rest()

    def _follow(self, context: Sequence[int]) -> None:
        """Keep the slots of the longest known prefix of `context`, without its last token, and drop the others."""
        start = self._settled if self._known[: self._settled] == list(context[: self._settled]) else 0
        end = min(len(self._known), len(context) - 1)
        kept = next((at for at in range(min(start, end), end) if self._known[at] != context[at]), end)
        self._cache.truncate(kept)
        del self._known[kept:]
        self._settled = kept

    def _read(self, tokens: list[int], *, needs_logits: bool = True) -> Drafting[DraftLogits]:
        """Read `tokens` into the cache."""
        read = yield DraftForward(self._model, BatchItem(self._cache, tokens, needs_logits=needs_logits))
        self._cache.commit(len(tokens), ())
        self._known += tokens
        return read

    def _grow(self, waiting: list[int], position: int, budget: int) -> Drafting[Draft]:
        tokens: list[int] = []
        parents: list[int] = []
        chances: list[float] = []
        trunk, chance = -1, 1.0
        while len(tokens) < budget:
            read = yield from self._read(waiting)
            started = perf_counter()
            best, shares = self._sampler.rank(read.logits[0], position, self._width)
            likely = [share for share in shares[1:] if chance * share >= MIN_PROBABILITY]
            width = min(1 + len(likely), budget - len(tokens))
            above, trunk = trunk, len(tokens)
            tokens += best[:width]
            parents += [above] * width
            chances += [chance * share for share in shares[:width]]
            chance, waiting, position = chances[trunk], [best[0]], position + 1
            if chance < max(self._least(read.seconds + perf_counter() - started, position), MIN_PROBABILITY):
                break
        return make_draft(tokens, parents, chances, [0] * len(tokens), [Source.MODEL] * len(tokens))
