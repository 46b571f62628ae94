"""Settings of traces, composed into the application's settings."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class TraceSettings(BaseModel):
    """`[traces]`: what strategies decided, answer by answer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path | None = Field(default=None, description="Folder for traces, which hold prompts; unset keeps none")
    keep: int = Field(default=200, ge=1, description="The newest so many are kept")
