"""The plug-in that vLLM loads in each of its processes: it makes vLLM's suffix method draft from our cache."""

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
    """Entry point of `vllm.general_plugins`. Adds a metric that names the drafter, whichever method is in use."""
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
    """Make vLLM accept the suffix method without Arctic Inference, and check our settings at the same moment."""
    from vllm.config import speculative  # pyright: ignore[reportMissingImports]

    def answered_here() -> bool:
        read_settings()  # raises an error that tells the operator what to correct
        return True

    speculative.has_arctic_inference = answered_here


def _replace_proposer() -> None:
    from vllm.v1.spec_decode import suffix_decoding  # pyright: ignore[reportMissingImports]

    suffix_decoding.SuffixDecodingProposer = SuffixDecodingProposer
    if runner := sys.modules.get("vllm.v1.worker.gpu_model_runner"):  # it has imported the name already
        vars(runner)["SuffixDecodingProposer"] = SuffixDecodingProposer


def _carry_salts() -> None:
    """Send each new request's `cache_salt` to the workers, as an attribute: vLLM's own message leaves it out."""
    from vllm.v1.core.sched.output import NewRequestData  # pyright: ignore[reportMissingImports]

    original = NewRequestData.from_request.__func__

    def from_request(cls: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        data = original(cls, request, *args, **kwargs)
        setattr(data, SALT, request.cache_salt)
        return data

    NewRequestData.from_request = classmethod(from_request)
