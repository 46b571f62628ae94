"""Model Runner V2 without vLLM and without a GPU: is every row of a batch served, and what does a step cost the host?

    python -m agentspec.benchmarks.vllm.rows --tokenizer path/to/smollm2 traces/*.jsonl.gz

Answers jump from one cached text to another. The device is played between the steps, so that what it would do by itself
takes no time; then it computes for 10 ms. As with asynchronous scheduling the tokens of step i are known while step
i + 1 is computed, and step i + 2 is launched 5 ms later. A row counts as served there if the search that knew the
tokens of step i has found its passages, or if its text follows older ones that last for the draft of step i + 2.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from agentspec.backends.engine_plugin.cache_router import CacheRouter
from agentspec.backends.engine_plugin.settings import DrafterSettings
from agentspec.backends.vllm.proposer import SALT
from agentspec.backends.vllm.runner_v2 import retrieval, speculator
from agentspec.backends.vllm.runner_v2.passages import shape_for
from agentspec.backends.vllm.runner_v2.retrieval import PassageRequest, PassageRetriever, SampledTokens
from agentspec.benchmarks.cache.costs import VOCABULARY, Workload
from agentspec.benchmarks.traces import load_encoder, read_calls
from agentspec.cache import SuffixCache
from agentspec.cache.tokens import Tokens
from agentspec.types import Namespace

DRAFTED, LONGEST = 7, 1024  # tokens
LASTING = 2 * (DRAFTED + 1) + DRAFTED  # that two steps may consume and one draft
JUMPS = (12, 41)  # tokens that an answer follows one text, the second excluded
STEP, LAUNCH = 0.010, 0.005  # seconds after the tokens of a step are known
WARM = 50  # steps at the start that do not count
NAMESPACE = Namespace("default", "m", "t")


class Arriving(SampledTokens):
    """Tokens that arrive when the device has computed them."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._computing, self.at = Lock(), 0.0  # cheap to make, as the event of a GPU that is used again
        self._computing.acquire()

    def arrived(self) -> bool:
        return not self._computing.locked()

    def wait(self) -> None:
        with self._computing:
            pass

    def arrive(self) -> None:
        self.at = time.perf_counter()
        self._computing.release()


class WatchedRetriever(PassageRetriever):
    """Tells for which rows a search is not done, and when searches ended after the arrival of their tokens."""

    arrived = 0.0
    searching: Sequence[PassageRequest] = ()

    def __init__(self, *given: Any, **more: Any) -> None:
        self.searches = list[tuple[int, float]]()
        super().__init__(*given, **more)

    def _find(self, requests: Sequence[PassageRequest], started: float) -> None:
        self.searching = requests
        super()._find(requests, started)
        self.searching = ()
        if self.arrived:
            self.searches.append((len(requests), time.perf_counter() - self.arrived))

    def late(self) -> set[int]:
        asked = [*self.searching, *list(self._wanted)]
        return {request.row for request in asked if request.text.left < LASTING}


class VllmSpeculator:
    """The part of vLLM's `NgramGPUSpeculator` that ours relies on; `vllm_config` is the number of rows."""

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        self.device, self.req_states, self.max_num_reqs = device, req_states, vllm_config
        self.max_model_len, self.num_speculative_steps = LONGEST, DRAFTED


class LateSpeculator(speculator.PassageSpeculator, VllmSpeculator):
    """Ours, with a kernel that the device runs later."""

    def open_cache(self, vllm_config: Any, beside: str = "") -> None:
        super().open_cache(vllm_config, beside)
        match, self._match = self._match, self._launch
        self.kernel: Callable[..., None] = match
        self.compute: Callable[[], None] = lambda: None
        self.taken: Arriving | None = None

    def _launch(self, *given: Any) -> None:
        self.compute = partial(self.kernel, *given)

    def _take(self, retriever: Any, sampled: Any, requests: Any, drafted: int) -> None:
        retriever.arrived = sampled.at
        super()._take(retriever, sampled, requests, drafted)
        self.taken = sampled


class Batch:
    """A batch of requests on device and host; each that ends is followed by another."""

    def __init__(self, cache: SuffixCache, texts: Sequence[Tokens], rows: int) -> None:
        router = CacheRouter(cache, DrafterSettings(), lambda tenant: NAMESPACE, None)
        self.random, self.texts, self.rows, self.begun = np.random.default_rng(rows), texts, rows, 0
        self.names, self.answers, self.at = [""] * rows, [np.zeros(0, np.int32)] * rows, [0] * rows
        self.states = SimpleNamespace(req_id_to_index={}, all_token_ids=SimpleNamespace(), total_len=SimpleNamespace())
        self.own = self.states.all_token_ids.gpu = torch.zeros((rows, LONGEST), dtype=torch.int32)
        self.lengths = self.states.total_len.gpu = torch.zeros(rows, dtype=torch.int32)
        self.drafts, self.counts = torch.zeros((rows, DRAFTED), dtype=torch.int64), torch.zeros(rows, dtype=torch.int32)
        self.retriever = WatchedRetriever(router.open, VOCABULARY, shape_for(DRAFTED))
        with patch.object(retrieval, "open_retriever", lambda *_: self.retriever):
            self.ours = LateSpeculator(rows, torch.device("cpu"), self.states)
        self.costs, self.begins = list[float](), list[float]()
        self.served, self.tokens = list[list[bool]](), list[int]()
        for row in range(rows):
            self.begin(row)
        self.begins.clear()
        self.launch()

    def begin(self, row: int) -> None:
        """End the request of a row, and begin the next."""
        name, self.begun, before = f"{self.begun}", self.begun + 1, self.names[row]
        self.names[row], self.answers[row], self.at[row] = name, self.answer(), 1
        self.own[row, 0], self.lengths[row] = prompt = int(self.answers[row][0]), 1
        sampling = SimpleNamespace(extra_args={"agentspec_store": "off"}, eos_token_id=-1, stop_token_ids=[], stop=[])
        sampling.max_tokens, sampling.seed, sampling.temperature = None, None, 0.0
        new = SimpleNamespace(req_id=name, prompt_token_ids=[prompt[0]], prefill_token_ids=[prompt[0]])
        new.sampling_params, new.lora_request, new.prompt_embeds = sampling, None, None
        setattr(new, SALT, None)
        started = time.thread_time()
        if before:
            self.ours.finish([before])
            del self.states.req_id_to_index[before]
        self.states.req_id_to_index[name] = row
        self.ours.begin([new])
        self.begins.append(time.thread_time() - started)
        self.drafts[row] = 0

    def answer(self) -> Tokens:
        pieces = list[Tokens]()
        while sum(map(len, pieces)) < LONGEST:
            text, count = self.texts[int(self.random.integers(len(self.texts)))], int(self.random.integers(*JUMPS))
            start = int(self.random.integers(len(text) - count))
            pieces.append(text[start : start + count])
        return np.concatenate(pieces)

    def launch(self) -> None:
        """The host's part of a step."""
        rows = torch.arange(self.rows, dtype=torch.int32)
        batch = SimpleNamespace(req_ids=list(self.names), num_reqs=self.rows, idx_mapping=rows)
        started = time.thread_time()
        self.proposed = self.ours.propose(batch, None, None, None, None, self.counts)
        self.costs.append(time.thread_time() - started)

    def compute(self) -> Arriving:
        """The device's part: verify the last drafts, sample a token more, draft by the kernel."""
        for row, (draft, answer) in enumerate(zip(self.drafts.numpy(), self.answers, strict=True)):
            fresh = answer[self.at[row] : self.at[row] + DRAFTED + 1]
            count = 1 + int(np.argmin(np.append(draft == fresh[:DRAFTED], False)))
            length = int(self.lengths[row])
            self.own[row, length : length + count] = torch.from_numpy(fresh[:count])
            self.lengths[row], self.counts[row] = length + count, count
            self.at[row] += count
        self.ours.compute()
        self.drafts = self.proposed.clone()
        self.tokens.append(int(self.counts.sum()))
        (sent := sends.pop()).arrive()
        return sent

    def step(self, launch: float) -> None:
        sent, started = self.compute(), time.perf_counter()
        time.sleep(launch) if launch else self.retriever.flush(60)
        late = self.retriever.late() if self.ours.taken is sent else range(self.rows)
        self.served.append([row not in late for row in range(self.rows)])
        for row, at in enumerate(self.at):
            if at > LONGEST - 3 * (DRAFTED + 1):
                self.begin(row)
        self.launch()
        time.sleep(max(0.0, launch and started + STEP - time.perf_counter()))

    def close(self) -> None:
        sends.pop().arrive()
        self.ours.close()

    def __str__(self) -> str:
        served, quarter = 100 * np.array(self.served)[WARM:], max(1, self.rows // 4)
        host, begins = 1000 * np.array(self.costs)[WARM:], 1000 * np.array(self.begins or [0.0])
        rows, ends = np.array(self.retriever.searches[WARM:] or [(0, 0.0)]).T
        return (
            f"{self.rows:4} requests: {served.mean():.2f} % of rows served, {served[:, :quarter].mean():.2f} and"
            f" {served[:, -quarter:].mean():.2f} % in the first and last quarter; ms: host {_spread(host)}, for a new"
            f" request {np.median(begins):.2f}; searches of {rows.mean():.1f} rows end after {_spread(1000 * ends)};"
            f" {np.mean(self.tokens[WARM:]) / self.rows:.3f} tokens a step"
        )


sends: list[Arriving] = []


def _spread(values: Any) -> str:
    median, p90, p99 = np.quantile(values, (0.5, 0.9, 0.99))
    return f"{median:.3f} (90th percentile {p90:.3f}, 99th {p99:.3f}, most {values.max():.3f})"


def _sent(*given: Any) -> Arriving:
    sends.append(Arriving(*given))
    return sends[-1]


def simulate(texts: Sequence[Tokens], requests: Sequence[int], *, steps: int, launch: float = LAUNCH) -> list[Batch]:
    """Batches of so many `requests` after `steps`; `launch` 0 waits for each search instead of some time."""
    batches, replaced = list[Batch](), patch.multiple(speculator, SampledTokens=_sent, tensor_group=lambda: None)
    with replaced, SuffixCache.open(memory_bytes=8 << 30) as cache:
        for text in texts:
            with cache.request(text[:1], namespace=NAMESPACE) as request:
                request.extend(text)
        for rows in requests:
            batches.append(batch := Batch(cache, [text for text in texts if len(text) > JUMPS[1]], rows))
            for _ in range(steps):
                batch.step(launch)
            batch.close()
            print(batch, flush=True)
    return batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--cached", type=float, nargs="+", default=[1e6, 1e7])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--steps", type=int, default=600)
    asked = parser.parse_args()
    encode = load_encoder(asked.tokenizer)
    workload = Workload.recorded([call for path in asked.traces for call in read_calls(path, encode, 100)])
    for cached in asked.cached:
        print(f"{int(cached)} cached tokens")
        simulate(list(workload.fill(int(cached))), asked.requests, steps=asked.steps)


if __name__ == "__main__":
    main()
