"""A simulated session: one agent that makes a call, waits for its answer, runs tools, and makes the next."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from agentspec.benchmarks.placement.costs import EngineCosts
from agentspec.benchmarks.placement.workload import CallShape, SessionShape
from agentspec.placement import Call


class SimulatedSession:
    """The state of a session and of the one call that it has under way. Times are simulated seconds."""

    __slots__ = (
        "answer",
        "arrived",
        "blocks",
        "deadline",
        "gateway",
        "hit",
        "keep",
        "known_to",
        "member",
        "name",
        "number",
        "own",
        "pauses",
        "position",
        "sent",
        "shape",
        "started",
        "streamed",
        "tokens",
        "tries",
        "waited",
        "work",
    )

    def __init__(self, number: int, shape: SessionShape, arrived: float, pauses: Sequence[float]) -> None:
        self.number, self.shape, self.arrived, self.pauses = number, shape, arrived, pauses
        self.name = f"s{number}"
        self.deadline = inf
        self.position = 0
        self.blocks: list[int] = []
        self.own = -1 - number  # its stretch in the engines' caches; shared ones are not negative
        self.keep = self.answer = self.tokens = 0
        self.member, self.gateway = "", 0  # where its latest call was sent, and by which gateway
        self.known_to = 0  # the gateways that have sent a call of it, a bit each
        self.tries = self.hit = self.work = 0
        self.sent = self.started = 0.0
        self.waited = 0.0  # by all its calls so far, before an engine began with them
        self.streamed = False

    @property
    def call(self) -> CallShape:
        return self.shape.calls[self.position]

    def alone(self, costs: EngineCosts) -> float:
        """Seconds from arrival to the last answer on an idle engine that keeps all."""
        shared, calls = self.shape.shared_tokens, self.shape.calls
        read = [calls[0].prompt + shared, *(call.prompt - call.keep for call in calls[1:])]
        return sum(costs.alone(new, call.answer) for new, call in zip(read, calls, strict=True)) + sum(self.pauses)

    def begin(self, now: float, block_tokens: int, shared_blocks: Sequence[int]) -> None:
        """Make the call at `position`: `tokens` of its own stretch are held, `blocks` are what the gateway sees."""
        call = self.call
        self.keep, self.answer, self.tokens = call.keep, call.answer, call.prompt + call.answer
        self.sent, self.tries, self.streamed = now, 0, False
        self.blocks = self.blocks or list(shared_blocks)
        shared = self.shape.shared_tokens
        del self.blocks[max((shared + call.keep) // block_tokens, len(shared_blocks)) :]
        base = ((self.number << 12) + self.position) << 20
        missing = range(len(self.blocks), (shared + call.prompt) // block_tokens)
        self.blocks.extend([base + place for place in missing])

    def placement(self) -> Call:
        """What the gateway knows of the call."""
        return Call(self.name, self.blocks)
