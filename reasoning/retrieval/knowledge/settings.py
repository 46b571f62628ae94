"""Settings of the knowledge bases, composed into the application's settings: `[knowledge.NAME]` tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, HttpUrl, SecretStr

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
    api_key: SecretStr | None = Field(default=None, description="Set it from the environment or api_key_file only")
    api_key_file: str | None = Field(default=None, description="File holding the API key")


KnowledgeSettings = Annotated[IndexSettings | RemoteSettings, Field(discriminator="kind")]
