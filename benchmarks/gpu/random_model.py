"""Models with random weights, created on their device, and engines that answer with recorded tokens.

Forced targets measure speed, not answers: the forwards are real, but recorded tokens replace the model's choices.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch import TorchBackend
from agentspec.backends.torch.loader import LoadedModel, prepare
from agentspec.backends.torch.model.batch import BatchItem, tree_layout
from agentspec.backends.torch.model.device import synchronize
from agentspec.backends.torch.model.target import TargetModel
from agentspec.benchmarks.report import rotated
from agentspec.benchmarks.runs import OFF, Run, RunTable, ask
from agentspec.cache import SuffixCache
from agentspec.recordings.replay import EncodedCall
from agentspec.types import Labels, SamplingParams, Speculation

ON = "on"
CONTEXT = 16_384
COPIED_BYTES = {"cuda": 4 << 30, "cpu": 64 << 20}
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
    },
    "3b": {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
    },
}
"""Shapes of Llama 3 by size (`config.json` of meta-llama/Llama-3.2-1B and -3B, Llama-3.1-8B), and one for tests."""


def build(shape: str, tokenizer: Any, device: torch.device, dtype: torch.dtype, *, spread: float = 0.02) -> LoadedModel:
    """A Llama with random weights of standard deviation `spread`, ready for the engine, with its float32 head.

    Raises like `prepare`, which also checks the forwards of chains and trees.
    """
    sizes: dict[str, Any] = SHAPES[shape] | {"vocab_size": max(SHAPES[shape]["vocab_size"], len(tokenizer))}
    config = LlamaConfig(
        **sizes,
        max_position_embeddings=CONTEXT,
        initializer_range=spread,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    standard = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            module = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(standard)
    return prepare(module, tokenizer, name=f"random {shape}", fingerprint=f"random {shape}")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each byte."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]


def read_bytes(target: TargetModel) -> int:
    """Bytes of weights that a forward reads: all except the embedding table, of which it reads one row per token."""
    module = target.module
    table = module.get_input_embeddings().weight
    held = {id(tensor): tensor for part in module.modules() for tensor in vars(part).values() if _is_weight(tensor)}
    held |= {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in held.values() if tensor is not table)


def _is_weight(value: object) -> bool:
    """Whether an attribute is a tensor: agentspec's layers hold float32 copies and packed weights as attributes."""
    return isinstance(value, torch.Tensor)


def copied_bytes(device: torch.device) -> int:
    return COPIED_BYTES.get(device.type, COPIED_BYTES["cpu"])


class ForcedModel(TargetModel):
    """A target whose best token at absolute position p is `script[p]`, whatever its logits; for one text at a time.

    `seconds` sums the time of forwards, including the wait for the device.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.script: Sequence[int] = ()
        self.seconds = 0.0

    def forward_batch(self, items: Sequence[BatchItem]) -> list[Tensor]:
        started = time.perf_counter()
        outputs = [self._forced(item, logits) for item, logits in zip(items, super().forward_batch(items), strict=True)]
        synchronize(self.device)
        self.seconds += time.perf_counter() - started
        return outputs

    def _forced(self, item: BatchItem, logits: Tensor) -> Tensor:
        """One-hot rows [outputs, vocab] of the script's tokens; token 0 after the script's end or without a script."""
        depths = tree_layout(len(item.tokens), item.draft_parents).depths[len(item) - len(logits) :]
        places = (item.kv_cache.length + depth + 1 for depth in depths.tolist())
        tokens = [self.script[place] if place < len(self.script) else 0 for place in places]
        forced = torch.zeros_like(logits)
        forced.scatter_(1, torch.tensor(tokens, dtype=torch.long, device=logits.device)[:, None], 1.0)
        return forced


class ForcedEngine:
    """An engine that gives the recorded answers of calls, one call after another, with speculation off and on.

    Off and on are two tenants. Both keep KV slots between the calls of a session; with speculation on, the engine
    drafts from the file's earlier calls, as in use.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.target = ForcedModel(loaded.target.module)
        self.target.graphs = loaded.target.graphs
        forced = LoadedModel(
            name="forced",
            target=self.target,
            tokenizer=loaded.tokenizer,
            fingerprint="forced targets, random weights",
            tokenizer_hash=loaded.tokenizer_hash,
            template_hash=loaded.template_hash,
        )
        self._cache = SuffixCache.open()
        self._namespace = forced.namespace
        self._backend = TorchBackend(forced, TorchSettings(), cache=self._cache)
        self.outside = {OFF: 0.0, ON: 0.0}  # seconds outside of forwards: drafting, drawing, committing

    def close(self) -> None:
        asyncio.run(self._backend.aclose())
        self._cache.close()

    def replay(self, name: str, calls: Sequence[EncodedCall], until: Callable[[], bool], learned: int = 0) -> RunTable:
        """Run the calls that fit the model's context, speculation off and on, until `until` returns True. The cache
        learns the first `learned` of them beforehand, at most half, which are not run.
        """
        table, ways = RunTable(name), {OFF: False, ON: True}
        fitting = [call for call in calls if self._fits(call)]
        learned = min(learned, len(fitting) // 2)
        for call in fitting[:learned]:
            self._learn(name, call)
        for number, call in enumerate(fitting[learned:]):
            if until():
                break
            for way, speculation in rotated(ways, number):
                table.add(way, asyncio.run(self._run(name, call, way, speculation=speculation)))
        return table

    def _learn(self, name: str, call: EncodedCall) -> None:
        with self._cache.request(
            call.prompt, namespace=self._namespace(_tenant(name, ON)), session=call.session
        ) as own:
            own.extend(call.response)

    def _fits(self, call: EncodedCall) -> bool:
        return len(call.prompt) + len(call.response) <= self._backend.context_length

    async def _run(self, name: str, call: EncodedCall, way: str, *, speculation: bool) -> Run:
        prompt, answer = call.prompt.tolist(), call.response.tolist()
        self.target.script = [*prompt, *answer]
        sampling = SamplingParams(temperature=0.0, max_tokens=len(answer), ignore_eos=True)
        inside, labels = self.target.seconds, Labels(call.session)
        run = await ask(self._backend, prompt, sampling, _tenant(name, way), labels=labels, speculation=speculation)
        self.outside[way] += run.seconds - (self.target.seconds - inside)
        assert list(run.tokens) == answer, "the engine's tokens are not its model's"
        return replace(run, speculation=run.speculation or Speculation(0, 0, len(answer), 0.0))


def _tenant(name: str, way: str) -> str:
    return f"{name}: {way}"
