"""Builds the backend that a `[backends.NAME]` table describes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from agentspec.backends.base import Backend
from agentspec.backends.model_store import require_known
from agentspec.backends.settings import BackendSettings, EncoderSettings, OpenAISettings
from agentspec.errors import ConfigurationError, extra_of, install_advice

if TYPE_CHECKING:
    from agentspec.cache import SuffixCache


def build_backend(name: str, settings: BackendSettings, open_cache: Callable[[], SuffixCache]) -> Backend:
    """The backend `name`, ready for requests. Blocks until its model is loaded.

    Only backends that draft call `open_cache`. Raises `ConfigurationError` for a package that is missing, and
    `ModelUnavailableError`.
    """
    if isinstance(settings, OpenAISettings):
        from agentspec.backends.openai import OpenAIBackend

        return OpenAIBackend(settings, name=name)
    require_known(settings.model)  # before torch is imported, which takes long
    try:
        if isinstance(settings, EncoderSettings):
            from agentspec.backends.torch.encoder_backend import EncoderBackend

            return EncoderBackend.load(settings)
        from agentspec.backends.torch import TorchBackend
    except ModuleNotFoundError as error:
        if not extra_of(error.name, ["torch"]):
            raise
        advice = f"needs the package {error.name!r}; {install_advice('torch')}"
        raise ConfigurationError(f"backends.{name}, of kind {settings.kind!r}, {advice}") from error
    return TorchBackend.load(settings, cache=open_cache())
