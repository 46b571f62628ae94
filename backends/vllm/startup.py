"""Makes the drafter for a vLLM server from vLLM's configuration and the operator's settings."""

from __future__ import annotations

from typing import Any

from agentspec.backends.engine_plugin.cache_router import close_at_exit, open_router
from agentspec.backends.engine_plugin.settings import enabled, read_settings
from agentspec.backends.vllm.drafting import ServerDrafter
from agentspec.backends.vllm.padding import SWITCH, padding_for
from agentspec.errors import ConfigurationError

ENGINE = "VLLM"
"""The name in the settings' environment variables."""


def drafts_here(config: Any) -> bool:
    """Whether the scheduler reads this rank's drafts: only those of the first rank in a tensor-parallel group.

    Raises `ConfigurationError` if every rank has its own scheduler: drafts depend on timing and would differ.
    """
    if config.parallel_config.distributed_executor_backend == "external_launcher":
        raise ConfigurationError("agentspec cannot draft under vLLM's external_launcher: use another executor")
    from vllm.distributed.parallel_state import get_tp_group, model_parallel_is_initialized  # pyright: ignore[reportMissingImports]

    return not model_parallel_is_initialized() or get_tp_group().rank_in_group == 0


def open_drafter(config: Any) -> ServerDrafter:
    """The drafter for a `VllmConfig`, with its cache open. Raises `ConfigurationError` and `CacheError`s."""
    model = config.model_config
    router = open_router(read_settings(ENGINE), model)
    enabled(SWITCH, default=False)  # raises now, not in the first round
    drafter = ServerDrafter(
        router.open, model.get_vocab_size(), on_close=router.close, padding=lambda: padding_for(config)
    )
    close_at_exit(drafter.close)
    return drafter
