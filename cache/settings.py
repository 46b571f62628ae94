"""Settings of the token cache, composed into the application's settings."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ByteSize, ConfigDict, Field, field_validator


class CacheSettings(BaseModel):
    """`[cache]` in agentspec.toml. Without a path the cache lives in memory only and is gone at exit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path | None = Field(default=None, description="Folder for the sequence database; unset keeps all in memory")
    memory_bytes: ByteSize = Field(default=ByteSize(512 << 20), gt=0, description="Most memory the index may use")
    store: bool = Field(default=True, description="Record prompts and outputs; false drafts from the session alone")

    @field_validator("path")
    @classmethod
    def _home(cls, path: Path | None) -> Path | None:
        return None if path is None else path.expanduser()
