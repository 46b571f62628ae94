"""Drafts from a small model that reads the same token ids as the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from time import perf_counter

from agentspec.backends.torch.drafters.base import MIN_PROBABILITY, Guess, StagedDrafter, make_draft, no_guess
from agentspec.backends.torch.drafters.forwards import DraftForward, Drafting, draft_alone
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


class ModelDrafter(StagedDrafter):
    """Drafts a path of the model's own draws, one forward per token, with the next best candidates as leaves beside it.

    It keeps KV slots of its own for one answer and, at each call, rewinds those of tokens that the target did not
    accept. The path ends where its probability falls below `least(seconds, context)`, the probability that makes one
    more forward of `seconds` worth its time. All answers of the engine's thread share the model, and its forwards.
    `room()` is the most slots that it may keep (None: any number); with fewer than it needs it drafts nothing.

    What another drafter's `guess` says comes next is read in the same forward, as the target verifies a draft: as far
    as the model draws the same tokens, they cost one forward together.
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

    def drafting(self, context: Sequence[int], budget: int, guess: Guess = no_guess) -> Drafting[Draft | None]:
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
            yield DraftForward(self._model, BatchItem(self._cache, waiting[:CHUNK], needs_logits=False))
            self._keep(waiting[:CHUNK])
            return None
        return (yield from self._grow(waiting, guess, len(context), budget))

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

    def _grow(self, waiting: list[int], guess: Guess, position: int, budget: int) -> Drafting[Draft]:
        tree = _Tree(budget)
        while True:
            ahead = list(takewhile(self._embeds, guess(tree.path, tree.room - 1)))
            chain = range(-1, len(ahead) - 1)
            read = yield DraftForward(self._model, BatchItem(self._cache, waiting, ahead, chain))
            started, right = perf_counter(), 0
            drawn = tree.grow(*self._sampler.rank(read.logits[0], position, self._width))
            while ahead[right : right + 1] == [drawn] and tree.room:
                right += 1
                drawn = tree.grow(*self._sampler.rank(read.logits[right], position + right, self._width))
            self._keep(waiting, ahead[:right])
            position += right + 1
            least = self._least(read.seconds + perf_counter() - started, position)
            if not tree.room or tree.chance < max(least, MIN_PROBABILITY):
                return tree.draft()
            waiting = [drawn]

    def _embeds(self, token: int) -> bool:
        return token < self._model.vocab_size

    def _keep(self, tokens: list[int], path: Sequence[int] = ()) -> None:
        """Keep the slots of the last forward's `tokens`, and of the tokens of `path` that it read in advance."""
        self._cache.commit(len(tokens), range(len(path)))
        self._known += [*tokens, *path]


class _Tree:
    """A `path` of drawn tokens with leaves beside it: `room` is for how many more nodes, `chance` the path's."""

    def __init__(self, budget: int) -> None:
        self.room, self._trunk, self.chance = budget, -1, 1.0
        self.path: list[int] = []
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._chances: list[float] = []

    def grow(self, best: list[int], shares: list[float]) -> int:
        """Add the candidates of the next position, and go on from the first, which is returned."""
        likely = [share for share in shares[1:] if self.chance * share >= MIN_PROBABILITY]
        width = min(1 + len(likely), self.room)
        above, self._trunk = self._trunk, len(self._tokens)
        self._tokens += best[:width]
        self._parents += [above] * width
        self._chances += [self.chance * share for share in shares[:width]]
        self.chance = self._chances[self._trunk]
        self.room -= width
        self.path.append(best[0])
        return best[0]

    def draft(self) -> Draft:
        count = len(self._tokens)
        return make_draft(self._tokens, self._parents, self._chances, [0] * count, [Source.MODEL] * count)
