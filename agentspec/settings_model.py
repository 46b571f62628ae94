"""What all parts of the settings are."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class SettingsModel(BaseModel):
    """A part of the settings. It refuses names that it does not know, infinity and what is no number."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
