"""Limits on what one API key may ask for."""

from __future__ import annotations

from pydantic import Field

from agentspec.settings_model import SettingsModel


class RateLimits(SettingsModel):
    """What one key may ask for; unset: no limit."""

    requests_per_minute: int | None = Field(default=None, ge=1, description="Requests in 60 seconds; unset: no limit")
    tokens_per_minute: int | None = Field(
        default=None, ge=1, description="Tokens of prompts and answers in 60 seconds; unset: no limit"
    )

    @property
    def unlimited(self) -> bool:
        """Whether there is no limit at all."""
        return not any(getattr(self, name) for name in RateLimits.model_fields)
