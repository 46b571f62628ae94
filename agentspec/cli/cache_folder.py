"""Which folder and which model the commands of `agentspec cache` mean."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from agentspec.config import Settings

PathOption = Annotated[Path | None, typer.Option(help="The cache's folder [default: cache.path]")]


def folder_of(settings: Settings, path: Path | None, *, create: bool = False) -> Path:
    """The folder given, or the configured one. Raises `ConfigurationError` where it is missing, unless it may be."""
    from agentspec.errors import ConfigurationError

    folder = settings.cache.path if path is None else path.expanduser()
    if folder is None:
        raise ConfigurationError("the cache is in memory only; set cache.path or give --path")
    if not (create or folder.is_dir()):
        raise ConfigurationError(f"there is no cache at {str(folder)!r}; a server with this cache.path creates it")
    return folder


def reference_of(settings: Settings, name: str) -> str:
    """The model reference behind a configured model or backend name; any other name is one itself."""
    from agentspec.backends.settings import TorchSettings

    backend = settings.models[name].backend if name in settings.models else name
    found = settings.backends.get(backend)
    return found.model if isinstance(found, TorchSettings) else name
