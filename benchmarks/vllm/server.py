"""Starts vLLM servers as processes in a separate environment, which `.ci/vllm-env` creates."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentspec.benchmarks.vllm.process import ServerProcess, free_port

ENVIRONMENT = "AGENTSPEC_VLLM_ENV"
# vLLM 0.32 cannot reload code that it compiled ahead of time for CPUs: each start would take minutes.
FIXED = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_AOT_COMPILE": "0"}

SUFFIX: dict[str, Any] = {"method": "suffix", "num_speculative_tokens": 32, "suffix_decoding_max_tree_depth": 64}


def find_environment(root: Path | None = None) -> Path | None:
    """The environment with vLLM: `AGENTSPEC_VLLM_ENV`, or `.venv-vllm` in `root` or the current folder; else None."""
    named = os.environ.get(ENVIRONMENT)
    folder = Path(named) if named else (root or Path.cwd()) / ".venv-vllm"
    return folder if (folder / "bin" / "vllm").exists() else None


class VllmServer(ServerProcess):
    """A server of the vLLM in `environment`, on a CPU."""

    def __init__(
        self,
        environment: Path,
        model: Path,
        log: Path,
        speculative: Mapping[str, Any] | None = None,
        variables: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        *,
        max_length: int = 2048,
        port: int | None = None,
    ) -> None:
        super().__init__(log=log, variables={**FIXED, **(variables or {})}, port=port or free_port())
        self.command = [
            str(environment / "bin" / "vllm"), "serve", str(model), "--served-model-name", "model",
            "--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32",
            "--max-model-len", str(max_length), "--max-num-seqs", "16", *options,
        ]  # fmt: skip
        if speculative:
            self.command += ["--speculative-config", json.dumps(speculative)]

    def metric(self, name: str) -> float:
        """A counter of the server's /metrics, summed over labels; 0 if there is none."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    def tokenize(self, text: str) -> list[int]:
        """The token ids of `text` without special tokens."""
        body = json.dumps({"model": "model", "prompt": text, "add_special_tokens": False}).encode()
        request = urllib.request.Request(f"{self.url}/tokenize", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return list(json.loads(answer.read())["tokens"])
