"""Recorded answers through the engine on a model of random weights: the real forwards for their time, and the recorded
tokens in place of what the model would say. Forced targets, random weights: a measure of speed, never of answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch import TorchBackend
from agentspec.backends.torch.loader import LoadedModel
from agentspec.backends.torch.model.batch import BatchItem
from agentspec.backends.torch.model.device import synchronize
from agentspec.backends.torch.model.target import TargetModel
from agentspec.backends.torch.model.tree_mask import tree_layout
from agentspec.benchmarks.decode import OFF, Run, Table
from agentspec.benchmarks.stats import rotated
from agentspec.cache import SuffixCache
from agentspec.recordings.traces import EncodedCall
from agentspec.types import GenerateRequest, Labels, SamplingParams, Speculation

ON = "on"


class ForcedModel(TargetModel):
    """A target whose best token at absolute position p is `script[p]`, whatever it computed; for one text at a time.

    `seconds` is the time spent in forwards, the waiting for the device included.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module, rewindable=True)
        self.script: Sequence[int] = ()
        self.seconds = 0.0

    def forward_batch(self, items: Sequence[BatchItem]) -> list[Tensor]:
        started = time.perf_counter()
        outputs = [self._forced(item, logits) for item, logits in zip(items, super().forward_batch(items), strict=True)]
        synchronize(self.device)
        self.seconds += time.perf_counter() - started
        return outputs

    def _forced(self, item: BatchItem, logits: Tensor) -> Tensor:
        """One-hot rows [outputs, vocab], of token 0 where the script has nothing to say, as before it is set."""
        depths = tree_layout(len(item.tokens), item.draft_parents).depths[len(item) - len(logits) :]
        places = (item.kv_cache.length + depth + 1 for depth in depths.tolist())
        tokens = [self.script[place] if place < len(self.script) else 0 for place in places]
        forced = torch.zeros_like(logits)
        forced.scatter_(1, torch.tensor(tokens, dtype=torch.long, device=logits.device)[:, None], 1.0)
        return forced


class Forced:
    """An engine whose answers are those of recorded calls, asked one after another with speculation off and on.

    Each way is a tenant of its own, which keeps key/value rows between the calls of a session and, on, drafts from the
    file's earlier calls, as it would in use.
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
            packed=loaded.packed,
        )
        self._cache = SuffixCache.open()
        self._backend = TorchBackend(forced, TorchSettings(), cache=self._cache)
        self.outside = {OFF: 0.0, ON: 0.0}  # seconds not spent in forwards: drafting, drawing, committing

    def close(self) -> None:
        asyncio.run(self._backend.aclose())
        self._cache.close()

    def replay(self, name: str, calls: Sequence[EncodedCall], until: Callable[[], bool]) -> Table:
        """Both ways' runs of the calls that fit the model, as many as there are before `until` says that time is up."""
        table, ways = Table(name), {OFF: False, ON: True}
        for number, call in enumerate(call for call in calls if self._fits(call)):
            if until():
                break
            for way, speculation in rotated(ways, number):
                table.add(way, asyncio.run(self._run(name, call, way, speculation=speculation)))
        return table

    def _fits(self, call: EncodedCall) -> bool:
        return len(call.prompt) + len(call.response) <= self._backend.context_length

    async def _run(self, name: str, call: EncodedCall, way: str, *, speculation: bool) -> Run:
        prompt, answer = call.prompt.tolist(), call.response.tolist()
        self.target.script = [*prompt, *answer]
        request = GenerateRequest(
            self._backend.model_name,
            token_ids=prompt,
            sampling=SamplingParams(temperature=0.0, max_tokens=len(answer), ignore_eos=True),
            labels=Labels(session=call.session),
            tenant=f"{name}: {way}",
            speculation=speculation,
        )
        tokens, done = list[int](), None
        inside, started = self.target.seconds, time.perf_counter()
        async for delta in self._backend.generate(request):
            tokens += delta.token_ids
            done = delta.speculation or done
        seconds = time.perf_counter() - started
        self.outside[way] += seconds - (self.target.seconds - inside)
        assert tokens == answer, "the engine did not say what its model said"
        return Run(tuple(tokens), seconds, done or Speculation(0, 0, len(tokens), 0.0))
