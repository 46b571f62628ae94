"""`[models.NAME]` without a strategy: which backends answer for a name."""

from __future__ import annotations

from typing import Self

from pydantic import Field, field_validator, model_validator

from agentspec.errors import suggestion
from agentspec.placement import DEFAULT_POLICY, POLICIES
from agentspec.settings_model import SettingsModel


class ModelSettings(SettingsModel):
    """`[models.NAME]`: a name that clients may send as `model`, and the backend that answers."""

    backend: str | None = Field(default=None, description="Name of a [backends.NAME] table")
    upstream_model: str | None = Field(default=None, description="Model name sent to the backend; unset sends its own")
    backends: tuple[str, ...] | None = Field(
        default=None, min_length=1, description="In place of backend: several, of kind openai, that serve the model"
    )
    placement: str = Field(
        default=DEFAULT_POLICY, description=f"Which of several servers takes a call: {', '.join(POLICIES)}"
    )
    fallback: tuple[str, ...] = Field(
        default=(), description="Models or backends that answer in its place, in this order, if no server of it can"
    )

    @property
    def sources(self) -> tuple[str, ...]:
        """The backends that serve it."""
        return self.backends or (self.backend or "",)

    @field_validator("placement")
    @classmethod
    def _known_policy(cls, value: str) -> str:
        if value not in POLICIES:
            raise ValueError(
                f"{value!r} is no placement policy; known: {', '.join(POLICIES)}{suggestion(value, POLICIES)}"
            )
        return value

    @model_validator(mode="after")
    def _one_way_to_backends(self) -> Self:
        if (self.backend is None) == (self.backends is None):
            raise ValueError("set either backend (one) or backends (a list)")
        for key in ("backends", "fallback"):
            names: tuple[str, ...] = getattr(self, key) or ()
            if twice := [name for name in names if names.count(name) > 1]:
                raise ValueError(f"{key} names {twice[0]!r} twice")
        return self
