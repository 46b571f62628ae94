"""The plug-in that vLLM loads in each of its processes: puts our cache behind its suffix method."""

from __future__ import annotations

import logging
import sys
from importlib.metadata import version
from typing import Any

from agentspec.backends.vllm.cache_router import SUPPORTED, supported
from agentspec.backends.vllm.metrics import publish_with_metrics
from agentspec.backends.vllm.proposer import SALT, SuffixDecodingProposer
from agentspec.backends.vllm.settings import enabled, read_settings

logger = logging.getLogger(__name__)

_installed = False


def install() -> None:
    """Entry point of `vllm.general_plugins`. Where another method is in use, this adds a metric that names it."""
    global _installed
    if _installed:
        return
    wanted = enabled()
    _installed = True
    _log_as_vllm_does()
    installed = version("vllm")
    if not supported(installed):
        if wanted:
            known = SUPPORTED[-1]
            logger.warning("agentspec leaves vLLM alone: it works with vLLM %s.x, not %s", known, installed)
        return
    publish_with_metrics(took_over=wanted)
    if wanted:
        _take_over()


def _take_over() -> None:
    _accept_without_arctic()
    _replace_proposer()
    _carry_salts()


def _log_as_vllm_does() -> None:
    ours, theirs = logging.getLogger("agentspec"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers, ours.propagate = theirs.handlers, theirs.propagate
        ours.setLevel(theirs.level)


def _accept_without_arctic() -> None:
    """vLLM asks for Arctic Inference when the suffix method is configured: the moment to look at our own settings."""
    from vllm.config import speculative  # pyright: ignore[reportMissingImports]

    def answered_here() -> bool:
        read_settings()  # raises what the operator has to correct
        return True

    speculative.has_arctic_inference = answered_here


def _replace_proposer() -> None:
    from vllm.v1.spec_decode import suffix_decoding  # pyright: ignore[reportMissingImports]

    suffix_decoding.SuffixDecodingProposer = SuffixDecodingProposer
    if runner := sys.modules.get("vllm.v1.worker.gpu_model_runner"):  # which has taken the name already
        vars(runner)["SuffixDecodingProposer"] = SuffixDecodingProposer


def _carry_salts() -> None:
    """A worker hears of new requests without their `cache_salt`: it goes along as an attribute."""
    from vllm.v1.core.sched.output import NewRequestData  # pyright: ignore[reportMissingImports]

    original = NewRequestData.from_request.__func__

    def from_request(cls: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        data = original(cls, request, *args, **kwargs)
        setattr(data, SALT, request.cache_salt)
        return data

    NewRequestData.from_request = classmethod(from_request)
