"""Drafting for all requests of a server, one round after another. Knows nothing of vLLM."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

from agentspec.backends.vllm.recorder import Open, Recorder, Said, wait_ready
from agentspec.backends.vllm.request_state import NOTHING, Ahead, Conversation, Request
from agentspec.backends.vllm.stats import RoundStats
from agentspec.backends.vllm.step_cost import StepCost
from agentspec.cache.index import Job, propose_batch
from agentspec.cache.tokens import Tokens
from agentspec.speculation.governor import RequestStats, allocate_budget
from agentspec.telemetry.safe_errors import safe_message

ANY = Request()
PATIENCE = 0.0004  # seconds that a round waits at most for new memories, and again until it may read the indexes
FREE = 0.005  # drafting up to this share of a step is not worth accounting for

logger = logging.getLogger(__name__)


class Turn(NamedTuple):
    """A request's part in a round: what its output grew by, how prompt and output end, how much may be drafted.

    `context` is int32 and looked at during the call only; of it the last `DEPTH` tokens count.
    """

    conversation: Conversation
    fresh: Tokens
    context: Tokens
    most: int


class ServerDrafter:
    """Chains of tokens for the requests of a server. `propose` is called by one thread, `begin` and `end` by the same.

    Nothing here raises: what goes wrong costs drafts. Nothing waits for a database, for an output to be recorded or for
    sequences to be evicted.
    """

    def __init__(
        self,
        open_memory: Open,
        vocab_size: int,
        *,
        idle: Callable[[], None] = lambda: None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._recorder = Recorder(open_memory, idle)
        self._on_close = on_close
        self._cost = StepCost()
        self._vocab_size = vocab_size
        self._last: list[Conversation] = []  # of the last round
        self._last_end = 0.0
        self._failed = False
        self.stats = RoundStats()

    def begin(self, prompt: Tokens, request: Request = ANY) -> Conversation:
        """A request came. `open_memory` decides where it is remembered."""
        conversation = Conversation(len(prompt), RequestStats(), request)
        self._recorder.begin(conversation, prompt)
        return conversation

    def say(self, conversation: Conversation, fresh: Tokens) -> None:
        """An output grew and nothing is to be drafted behind it."""
        self._recorder.extend([self._said(conversation, fresh)])

    def end(self, conversation: Conversation) -> None:
        """A request is over."""
        self._recorder.end(conversation)

    def close(self) -> None:
        """Remember what was said so far, then stop. Idempotent."""
        self._recorder.close()
        self._on_close()

    def flush(self, timeout: float = 10.0) -> bool:
        return self._recorder.flush(timeout)

    def propose(self, turns: Sequence[Turn], *, steady: bool = True) -> list[list[int]]:
        """What each request's output may go on with. Unless `steady` the step before did other work too."""
        started = perf_counter()
        said: list[Said] = []
        try:
            said = self._learn(turns, started if steady else None)
            chains = self._draft(turns)
        except Exception as error:
            self._report(error)
            chains = [[] for _ in turns]
        self._recorder.extend(said)  # now, not before: it would work at the same time, and both need the interpreter
        self._last, self._last_end = [turn.conversation for turn in turns], perf_counter()
        self.stats.add(self._last_end - started, sum(map(len, chains)))
        return chains

    def _learn(self, turns: Sequence[Turn], now: float | None) -> list[Said]:
        said = [self._said(turn.conversation, turn.fresh) for turn in turns]
        # Where others came or went, the time since the last round is not the cost of its tokens.
        if now is not None and self._last and self._last == [turn.conversation for turn in turns]:
            self._judge(turns, now - self._last_end)
        return said

    def _said(self, conversation: Conversation, fresh: Tokens) -> Said:
        tokens = conversation.advance(fresh)
        self.stats.accepted += conversation.accepted
        return Said(conversation, tokens, len(conversation.chain), conversation.accepted)

    def _judge(self, turns: Sequence[Turn], seconds: float) -> None:
        """Learn what the step cost, and for each request whether asking for drafts pays.

        What it costs to verify them in vain is left to `allocate_budget`, which sees it in the request's factor: one
        that cannot be drafted for now may copy a page next.
        """
        asked = [conversation for conversation in self._last if conversation.asked]
        self._cost.observe(len(turns) + sum(len(conversation.chain) for conversation in asked), seconds)
        token = seconds / max(1, sum(len(turn.fresh) for turn in turns))
        cost = max(0.0, self.stats.last_seconds - FREE * seconds) / max(1, len(asked))
        for conversation in asked:
            accepted = conversation.accepted
            conversation.pace.observe(conversation.expected, accepted, cost, accepted * token)

    def _draft(self, turns: Sequence[Turn]) -> list[list[int]]:
        wait_ready([turn.conversation for turn in turns if not turn.conversation.ready.is_set()], PATIENCE)
        self._look_ahead(turns)
        worths = [turn.conversation.worth(turn.most) for turn in turns]
        counts = allocate_budget(worths, len(turns), lambda drafted: self._cost.many(len(turns) + drafted))
        return [
            turn.conversation.propose(count, sum(worth[:count]))
            for turn, worth, count in zip(turns, worths, counts, strict=True)
        ]

    def _look_ahead(self, turns: Sequence[Turn]) -> None:
        """Ask what may follow, for requests that do not know it from the round before."""
        floor = self._cost.least_worth(len(turns))
        asked = [(turn.conversation, job) for turn in turns if (job := self._job(turn, floor))]
        drafts = propose_batch([job for _, job in asked], PATIENCE) if asked else []
        for (conversation, _), draft in zip(asked, drafts, strict=True):
            conversation.ahead = self._legal(Ahead(draft.tokens.tolist(), draft.probabilities.tolist()))

    @staticmethod
    def _job(turn: Turn, floor: float) -> Job | None:
        """What to search for, where a request may be drafted for and does not know it yet."""
        conversation, memory = turn.conversation, turn.conversation.memory
        if memory is None or conversation.over or turn.most <= 0 or not conversation.pace.ask():
            conversation.asked, conversation.ahead = False, NOTHING
            return None
        conversation.asked = True
        if conversation.knows():
            return None
        return memory.drafter, memory.indexes, turn.context, turn.most, floor, True

    def _legal(self, ahead: Ahead) -> Ahead:
        """As far as the model knows the tokens."""
        if max(ahead.tokens, default=0) < self._vocab_size:
            return ahead
        count = next(i for i, token in enumerate(ahead.tokens) if token >= self._vocab_size)
        return Ahead(ahead.tokens[:count], ahead.worth[:count])

    def _report(self, error: Exception) -> None:
        if not self._failed:
            logger.warning("agentspec: a round went without drafts: %s", safe_message(error))
        self._failed = True
