"""Settings of the knowledge bases, composed into the application's settings: `[knowledge.NAME]` tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, HttpUrl, SecretStr, model_validator

from agentspec.settings_model import SettingsModel


class IndexSettings(SettingsModel):
    """`[knowledge.NAME] kind = "index"`: a folder that `agentspec kb build` made."""

    kind: Literal["index"] = "index"
    path: Path = Field(description="The folder")
    model: str | None = Field(default=None, description="The embedding model, if it is not where it was when building")
    threads: int = Field(default=1, ge=1, description="Threads of a search; more compete with the local engine")


class RemoteSettings(SettingsModel):
    """`[knowledge.NAME] kind = "remote"`: a service that speaks the protocol of docs/retrieval.md."""

    kind: Literal["remote"] = "remote"
    url: HttpUrl = Field(description="The service's root, to which /search is added")
    timeout: float = Field(default=30.0, gt=0, description="Seconds a search may take")
    connect_timeout: float = Field(default=5.0, gt=0, description="Seconds to connect")
    retries: int = Field(default=0, ge=0, le=10, description="Further tries of a search that failed")
    ranks_by: Literal["words", "bm25", "dense"] = Field(
        default="words",
        description="How the cache ranks: by words alone, or as the service does where it sends weights or vectors",
    )
    model: str | None = Field(default=None, description="The service's embedding model, with ranks_by = dense")
    api_key: SecretStr | None = Field(default=None, description="Set it from the environment or api_key_file only")
    api_key_file: str | None = Field(default=None, description="File holding the API key")

    @model_validator(mode="after")
    def _dense_has_a_model(self) -> Self:
        if (self.ranks_by == "dense") != (self.model is not None):
            raise ValueError('ranks_by = "dense" and model go together: set both or neither')
        return self


KnowledgeSettings = Annotated[IndexSettings | RemoteSettings, Field(discriminator="kind")]
