"""What a step of an engine costs, and how much an engine holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Self

from pydantic import Field, ValidationError

from agentspec.errors import ConfigurationError
from agentspec.settings_model import SettingsModel


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

    @classmethod
    def read(cls, path: Path) -> Self:
        """The costs in a JSON file. Raises `ConfigurationError` that names the wrong key."""
        try:
            return cls.model_validate(json.loads(path.read_text()))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"])) or "the file"
            raise ConfigurationError(f"{path}: {key}: {first['msg']}") from None
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigurationError(f"{path}: cannot be read: {error}") from None

    def alone(self, prompt: int, answer: int) -> float:
        """Seconds of a call that an idle engine serves, with `prompt` tokens to read."""
        steps = -(-prompt // self.max_batched_tokens) + answer - 1
        return steps * (self.step + self.sequence) + prompt * self.prompt_token
