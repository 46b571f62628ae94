"""Recorded calls as token ids: those that the caches learn beforehand, and those that are timed."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

from agentspec.benchmarks.gpu.random_model import CONTEXT
from agentspec.errors import ConfigurationError
from agentspec.recordings.traces import EncodedCall, load_encoder, read_calls


@dataclass(frozen=True, slots=True)
class TimedCall:
    """A call and the name of its file."""

    file: str
    call: EncodedCall


@dataclass(frozen=True, slots=True)
class PreparedCalls:
    """What is learned, what is timed, file by file in turn, and the least vocabulary that holds all tokens."""

    learned: Sequence[EncodedCall]
    timed: Sequence[TimedCall]
    vocabulary: int

    def write_learned(self, path: Path) -> Path:
        """Write what is learned as lines of {"session", "prompt", "response"}, compressed."""
        with gzip.open(path, "wt") as lines:
            for call in self.learned:
                kept = {"session": call.session, "prompt": call.prompt.tolist(), "response": call.response.tolist()}
                lines.write(json.dumps(kept) + "\n")
        return path


def prepare_calls(traces: Sequence[Path], tokenizer: Path, learned: int) -> PreparedCalls:
    """The calls of all files that fit the model; the first `learned` of each file, at most half, are learned.

    Raises `ConfigurationError` for a file that cannot be used, and if no call fits.
    """
    encode = load_encoder(tokenizer)
    files = {path: [call for call in read_calls(path, encode) if _fits(call)] for path in traces}
    count = {path: min(learned, len(calls) // 2) for path, calls in files.items()}
    named = ([TimedCall(_name(path), call) for call in calls[count[path] :]] for path, calls in files.items())
    timed = [call for turn in zip_longest(*named) for call in turn if call is not None]
    if not timed:
        raise ConfigurationError(f"no recorded call has fewer than {CONTEXT} tokens with its answer")
    tokens = chain.from_iterable((call.prompt, call.response) for calls in files.values() for call in calls)
    vocabulary = 1 + max(int(part.max()) for part in tokens if len(part))
    return PreparedCalls([call for path in traces for call in files[path][: count[path]]], timed, vocabulary)


def _name(path: Path) -> str:
    return path.name.split(".")[0]


def _fits(call: EncodedCall) -> bool:
    """Whether prompt and answer fit, and there is a prompt, from which vLLM starts."""
    return 0 < len(call.prompt) < CONTEXT - len(call.response)
