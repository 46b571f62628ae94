"""One vLLM engine as a process: takes commands as lines of JSON, answers each with one line, and logs to stderr.

It runs in vLLM's environment, as `python -m agentspec.benchmarks.vllm.worker OPTIONS`, with the options of
vLLM's `LLM` and `device` as JSON. The first line says {"ready": seconds, "info"} or {"failed": why}; then answer
{"op": "generate", "prompts", "max_tokens", "sessions"} and {"op": "call", "name", "arguments"} of `BenchmarkExtension`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from agentspec.backends.engine_plugin.drafter import ServerDrafter
from agentspec.backends.engine_plugin.request_state import RequestInfo
from agentspec.benchmarks.vllm import SCRIPTED
from agentspec.types import Labels

EXTENSION = f"{__package__}.extension.BenchmarkExtension"

FLUSH_SECONDS = 60.0

Reply = Callable[[dict[str, Any]], None]


class EngineWorker:
    """The engine, and what it answers to commands."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM, ModelRegistry  # pyright: ignore[reportAttributeAccessIssue]
        from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

        device = options.pop("device")
        if current_platform.device_type != device:
            raise RuntimeError(f"this vLLM runs on {current_platform.device_type or 'no device'}, not on {device}")
        ModelRegistry.register_model(SCRIPTED, f"{__package__}.model:{SCRIPTED}")  # the extension does so elsewhere
        self._llm = LLM(**options, worker_extension_cls=EXTENSION)
        self.call("bench_count")

    def call(self, name: str, *arguments: Any) -> Any:
        return self._llm.collective_rpc(name, args=arguments)[0]

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["op"] == "call":
            return {"value": self.call(asked["name"], *asked["arguments"])}
        return self._generate(asked)

    def _generate(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Greedy answers, each of exactly its `max_tokens`; seconds are from the call to its return."""
        from vllm import SamplingParams  # pyright: ignore[reportAttributeAccessIssue]

        sampling = [
            SamplingParams(
                temperature=0.0, max_tokens=most, ignore_eos=True, detokenize=False,
                extra_args={"agentspec_session": session} if session else None,
            )
            for most, session in zip(asked["max_tokens"], asked["sessions"], strict=True)
        ]  # fmt: skip
        self.call("bench_count")
        started = time.perf_counter()
        prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        return {
            "seconds": seconds,
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens or 0 for output in outputs],
            "decode": [output.metrics.last_token_ts - output.metrics.first_token_ts for output in outputs],
            "steps": self.call("bench_count"),
        }


def own_output() -> Reply:
    """Keep stdout for answers alone: whatever else writes there goes to the log from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    return reply


def learn_call(ours: Any, call: dict[str, Any]) -> int:
    """Let a `ServerDrafter` or a `PassageRetriever` learn one call, as if a request had made it."""
    prompt, answer = (np.array(call[part], dtype=np.int32) for part in ("prompt", "response"))
    info = RequestInfo(Labels(call["session"]), max_tokens=len(answer))
    if isinstance(ours, ServerDrafter):
        request: Any = ours.begin_state(prompt, info)
        ours.record(request, answer)
        ours.end(request)
    else:
        request = ours.begin(prompt, info)
        ours.after(None, partial(ours.advance, [(request, answer)]))
        ours.after(None, partial(ours.end, request))
    if not ours.flush(FLUSH_SECONDS):
        raise RuntimeError(f"the cache did not take a call in within {FLUSH_SECONDS:g} s")
    return 1


def main() -> None:
    reply, started = own_output(), time.perf_counter()
    try:
        worker = EngineWorker(json.loads(sys.argv[1]))
        reply({"ready": time.perf_counter() - started, "info": worker.call("bench_info")})
    except Exception as error:
        reply({"failed": repr(error)})
        raise
    for line in sys.stdin:
        try:
            reply(worker.answer(json.loads(line)))
        except Exception as error:
            reply({"failed": repr(error)})
            raise


if __name__ == "__main__":
    main()
