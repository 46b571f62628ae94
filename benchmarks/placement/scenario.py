"""What is simulated: every parameter, so that a result can be repeated, and what an engine costs and holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from agentspec.errors import ConfigurationError
from agentspec.placement import POLICIES
from agentspec.settings_model import SettingsModel

Order = Literal["arrival", "deadline"]


class EngineCosts(SettingsModel):
    """An engine with continuous batching and chunked prefill. All costs are seconds.

    A step that decodes `n` sequences with `k` tokens of context in all, and reads `p` tokens of prompts, takes
    `step + n * sequence + k * context_token + p * prompt_token`. The defaults are computed from data sheets and not
    measured: Llama 3.1 8B in bfloat16 on an H100 with 80 GB, 70 % of its memory bandwidth and half of its arithmetic.
    """

    step: float = Field(default=0.008, gt=0, description="Of a step, whatever is in it")
    sequence: float = Field(default=2e-5, ge=0, description="Of each sequence that decodes")
    context_token: float = Field(default=5.6e-8, ge=0, description="Of each token of their contexts")
    prompt_token: float = Field(default=3.2e-5, gt=0, description="Of each token of a prompt that is not cached")
    max_batched_tokens: int = Field(default=2048, ge=1, description="Tokens of prompts read in one step")
    max_running: int = Field(default=256, ge=1, description="Sequences at once")
    kv_tokens: int = Field(default=412_000, ge=1, description="Tokens that the KV cache holds")
    block_tokens: int = Field(default=16, ge=1, description="Tokens that the prefix cache shares at once")

    def alone(self, prompt: int, answer: int) -> float:
        """Seconds of a call that an idle engine serves, with `prompt` tokens to read."""
        steps = -(-prompt // self.max_batched_tokens) + answer - 1
        return steps * (self.step + self.sequence) + prompt * self.prompt_token


class Scenario(SettingsModel):
    """The parameters of one simulation. Times are seconds."""

    policy: str = Field(default="workflow", description="Which engine takes a call")
    order: Order = Field(default="arrival", description="Which waiting call an engine takes next")
    engines: int = Field(default=10, ge=1, description="Engines")
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

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, not {self.policy!r}")
        if self.deadline_high < self.deadline_low:
            raise ValueError("deadline_high must not be below deadline_low")
        return self

    @classmethod
    def read(cls, path: Path | None, **given: Any) -> Self:
        """The parameters in a JSON file, and those `given`. Raises `ConfigurationError` that names the wrong one."""
        try:
            written = {} if path is None else json.loads(path.read_text())
            return cls.model_validate({**written, **given})
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            said = f"{name}: {first['msg']}" if name else first["msg"].removeprefix("Value error, ")
            raise ConfigurationError(said) from None
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise ConfigurationError(f"{path}: cannot be read: {error}") from None
