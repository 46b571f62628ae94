"""Downloads a model of the hub to a local folder: weights as safetensors, never pickles, and no code."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from agentspec.errors import ModelUnavailableError, install_advice

ALLOWED = ("*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def snapshot(repository: str, *, show: bool) -> Path:
    """Download the needed files of `repository`, or find them in the hub client's own cache; returns their folder.

    Raises `ModelUnavailableError` if neither works.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ModelUnavailableError(f"model-hub ids need huggingface_hub; {install_advice('torch')}") from None
    try:
        with contextlib.nullcontext() if show else quiet_bars():
            return Path(snapshot_download(repository, allow_patterns=list(ALLOWED), ignore_patterns=["*/*"]))
    except Exception as error:  # the hub client raises its HTTP library's own errors too
        cause = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelUnavailableError(
            f"cannot fetch {repository!r} from the model hub: {cause}\n"
            "Check the name and the network (HF_TOKEN for a gated model), or name a local folder or .gguf file instead"
        ) from None


def is_hub_id(ref: str) -> bool:
    """Whether `ref` has the shape of a hub id, `org/name`."""
    return _ID.fullmatch(ref) is not None


def can_fetch(repository: str) -> bool:
    """Whether the hub answers and has `repository`."""
    try:
        from huggingface_hub import model_info

        model_info(repository, timeout=10)
    except Exception:  # the hub client raises its HTTP library's own errors too
        return False
    return True


@contextlib.contextmanager
def quiet_bars() -> Iterator[None]:
    """Disable the hub client's own progress bars while the block runs."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
