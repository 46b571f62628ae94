"""What the benchmark adds to vLLM's worker: random weights that all engines draw alike, scripts, learning, counting.

vLLM imports this file in each process that runs a model, which makes the scripted model known there.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from typing import Any

import torch
from vllm import ModelRegistry  # pyright: ignore[reportAttributeAccessIssue]

from agentspec.benchmarks.vllm import SCRIPTED
from agentspec.benchmarks.vllm.worker import learn_call

NEIGHBOURS = 32  # each token is likely to be followed by the next of so many

ModelRegistry.register_model(SCRIPTED, f"{__package__}.model:{SCRIPTED}")


class BenchmarkExtension:
    """Methods that `LLM.collective_rpc` calls by name."""

    model_runner: Any
    vllm_config: Any
    device: torch.device

    def bench_info(self) -> dict[str, Any]:
        """What this engine runs, to be told beside its figures."""
        compiled, runner = self.vllm_config.compilation_config, self.model_runner
        layers = compiled.static_forward_context.values()
        return {
            "runner": type(runner).__module__,
            "drafter": type(self._bench_drafter()).__name__,
            "attention": sorted({type(getattr(layer, "impl", layer)).__name__ for layer in layers}),
            "graphs": str(compiled.cudagraph_mode),
            "sizes": list(compiled.cudagraph_capture_sizes or []),
            "asynchronous": bool(self.vllm_config.scheduler_config.async_scheduling),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        }

    def bench_draw_weights(self, spread: float, follow: float) -> bool:
        """Draw weights of standard deviation `spread` from seeds. `follow` is how much more likely each token's next
        neighbour becomes, so that texts repeat.
        """
        model = self.model_runner.get_model()
        generator = torch.Generator(device=self.device)
        for seed, (name, weight) in enumerate(sorted(model.named_parameters())):
            generator.manual_seed(seed)
            _draw(weight.data, generator, name, spread)
        table, head = model.model.embed_tokens.weight.data, model.lm_head.weight.data
        place = torch.arange(len(table), device=table.device)
        following = place // NEIGHBOURS * NEIGHBOURS + (place + 1) % NEIGHBOURS
        head[following] += (follow * table.float()).to(head.dtype)
        return True

    def bench_script(self, tokens: Sequence[int]) -> bool:
        self.model_runner.get_model().set_script(tokens)
        return True

    def bench_learn(self, path: str) -> int:
        """Let our cache learn calls, lines of {"session", "prompt", "response"} in tokens. Returns their number."""
        drafter = self._bench_drafter()
        ours = getattr(drafter, "_drafter", None) or getattr(drafter, "_retriever", None)
        if ours is None:
            raise RuntimeError(f"this engine drafts by {type(drafter).__name__}, which is not agentspec's")
        with gzip.open(path, "rt") as lines:
            return sum(learn_call(ours, json.loads(line)) for line in lines)

    def bench_count(self) -> list[int]:
        """The number of tokens of each step since the last call; the first call begins to count."""
        runner = self.model_runner
        if not hasattr(runner, "bench_steps"):
            runner.execute_model = _counting(runner, runner.execute_model)
        counted, runner.bench_steps = getattr(runner, "bench_steps", []), []
        return list(counted)

    def _bench_drafter(self) -> Any:
        """The drafter of either runner of vLLM; the second calls it speculator."""
        runner = self.model_runner
        return getattr(runner, "speculator", None) or getattr(runner, "drafter", None)


def _draw(weight: torch.Tensor, generator: torch.Generator, name: str, spread: float) -> None:
    if "norm" in name:
        weight.fill_(1.0)
        return
    drawn = torch.randn(weight.shape, generator=generator, device=weight.device)
    weight.copy_(drawn * (1.0 if "embed" in name else spread))


def _counting(runner: Any, execute_model: Any) -> Any:
    def counted(scheduler_output: Any, *others: Any, **named: Any) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            runner.bench_steps.append(scheduler_output.total_num_scheduled_tokens)
        return execute_model(scheduler_output, *others, **named)

    return counted
