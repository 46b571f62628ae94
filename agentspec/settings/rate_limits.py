"""Limits on what one API key may ask for."""

from __future__ import annotations

from pydantic import Field

from agentspec.settings_model import SettingsModel


class RateLimits(SettingsModel):
    """`[server.key_limits]`: what each key may ask for where its own entry does not say."""

    requests_per_minute: int | None = Field(
        default=None, ge=0, description="Requests in 60 seconds; 0: no limit, whatever key_limits says"
    )
    tokens_per_minute: int | None = Field(
        default=None, ge=0, description="Tokens of prompts and answers in 60 seconds; 0 as above"
    )

    def over(self, default: RateLimits) -> RateLimits:
        """These limits, with the default ones where these say nothing; 0 is then None: no limit."""
        pairs = ((name, getattr(self, name), getattr(default, name)) for name in RateLimits.model_fields)
        return RateLimits(**{name: (other if own is None else own) or None for name, own, other in pairs})

    @property
    def unlimited(self) -> bool:
        """Whether there is no limit at all."""
        return not any(getattr(self, name) for name in RateLimits.model_fields)
