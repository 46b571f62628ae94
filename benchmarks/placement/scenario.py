"""What is simulated: every parameter, so that a result can be repeated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from agentspec.benchmarks.placement.costs import EngineCosts
from agentspec.benchmarks.placement.workload import SessionShape
from agentspec.errors import ConfigurationError
from agentspec.placement import POLICIES
from agentspec.settings_model import SettingsModel

Order = Literal["arrival", "deadline"]


class Scenario(SettingsModel):
    """The parameters of one simulation. Times are seconds."""

    policy: str = Field(default="workflow", description="Which engine takes a call")
    order: Order = Field(default="arrival", description="Which waiting call an engine takes next")
    engines: int = Field(default=10, ge=1, description="Engines")
    gateways: int = Field(
        default=1, ge=1, description="Gateways that know nothing of each other; each call reaches any"
    )
    sessions: int = Field(default=2000, ge=1, description="Sessions that arrive")
    rate: float = Field(default=1.0, gt=0, description="Sessions that arrive in a second, as a Poisson process")
    seed: int = Field(default=0, ge=0, description="Of arrivals, of the choice of sessions, and of pauses")
    costs: EngineCosts = Field(default_factory=EngineCosts, description="Of every engine")
    pause: float = Field(default=2.0, ge=0, description="Median pause between calls that were recorded without one")
    pause_spread: float = Field(default=1.0, ge=0, le=10, description="Standard deviation of such a pause's logarithm")
    deadline_low: float = Field(default=1.5, gt=0, description="A session's deadline, in times of what it takes alone")
    deadline_high: float = Field(default=4.0, gt=0, description="The most of that; drawn evenly")
    deadline_share: float = Field(default=1.0, ge=0, le=1, description="Share of the sessions that have one")
    warm_up: float = Field(
        default=0.1, ge=0, lt=1, description="Share of the sessions, the first, that are not counted"
    )
    block_tokens: int = Field(default=512, ge=1, description="Tokens of a block that placement compares")
    scrape: float = Field(default=1.0, ge=0, description="Seconds for which an engine's queue and KV use are not asked")
    kill_every: float = Field(
        default=0.0, ge=0, description="Seconds after which one engine dies, and the next; 0: none"
    )
    restart: float = Field(default=20.0, ge=0, description="Seconds until it is back, with an empty cache")
    detect: float = Field(
        default=1.0, ge=0, description="Seconds until the gateway tries a call of a dead engine again"
    )
    retries: int = Field(default=2, ge=0, description="Further tries of a call that had not begun to stream")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, not {self.policy!r}")
        if self.deadline_high < self.deadline_low:
            raise ValueError("deadline_high must not be below deadline_low")
        if self.kill_every and self.restart // self.kill_every + 1 >= self.engines:
            raise ValueError("all engines would be dead at once: shorten restart or kill less often")
        return self

    def require_room(self, shapes: Sequence[SessionShape]) -> None:
        """Raise `ConfigurationError` for a call that no engine can hold."""
        longest = max(shape.longest for shape in shapes)
        if longest > self.costs.kv_tokens:
            raise ConfigurationError(
                f"a call of {longest} tokens fits into no engine: kv_tokens is {self.costs.kv_tokens}; "
                "give engines with more room by --costs, or leave the recording out"
            )
