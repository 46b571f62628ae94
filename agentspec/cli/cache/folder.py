"""Finds the folder and the model that the commands of `agentspec cache` use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from agentspec.backends.settings import TorchSettings
    from agentspec.settings.load import Settings

PathOption = Annotated[str | None, typer.Option(help="The cache's folder or address [default: cache.path]")]


def folder_of(settings: Settings, path: str | None, *, create: bool = False) -> Path | str:
    """The folder or database at `path`, or the configured one.

    Raises `ConfigurationError` if neither is set, and for a folder without a cache unless `create` is true.
    """
    from agentspec.cache.storage.sqlite import DATABASE
    from agentspec.errors import ConfigurationError

    chosen = settings.cache if path is None else settings.cache.model_copy(update={"path": _location(path)})
    folder = chosen.location()
    if folder is None:
        raise ConfigurationError(
            "the cache is in memory only, so there is no folder to use: give --path FOLDER, or set cache.path in"
            " agentspec.toml"
        )
    if isinstance(folder, Path) and not (create or (folder / DATABASE).is_file()):  # else one would be made there
        raise ConfigurationError(f"there is no cache at {str(folder)!r}; a server with this cache.path creates it")
    return folder


def shown(folder: Path | str) -> str:
    """The folder or database address for printing, without a password."""
    from agentspec.cache.settings import without_password

    return without_password(str(folder))


def _location(path: str) -> Path | str:
    from agentspec.cache.settings import parse_location
    from agentspec.errors import ConfigurationError

    try:
        return cast("Path | str", parse_location(path))
    except ValueError as error:
        raise ConfigurationError(f"--path {error}") from None


def adapter_of(settings: Settings, name: str) -> str | None:
    """The folder of the LoRA adapter of a configured model or backend name, if it has one."""
    local = _local(settings, name)
    return None if local is None else local.adapter


def reference_of(settings: Settings, name: str) -> str:
    """The model reference of a configured model or backend name; any other name is itself a reference.

    For a strategy it is the reference of the base model.
    """
    local = _local(settings, name)
    return name if local is None else local.model


def _local(settings: Settings, name: str) -> TorchSettings | None:
    """The local backend of a model or backend name."""
    from agentspec.backends.settings import TorchSettings
    from agentspec.settings.models import ModelSettings

    model = settings.models.get(name)
    if model is not None and not isinstance(model, ModelSettings):
        return _local(settings, model.base)
    found = settings.backends.get(name if model is None else model.sources[0])
    return found if isinstance(found, TorchSettings) else None
