"""Model Runner V2 in miniature: the texts of all requests in tensors, and steps that verify drafts."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from agentspec.backends.vllm.proposer import SALT
from agentspec.backends.vllm.runner_v2 import retrieval
from agentspec.backends.vllm.runner_v2.plugin import listen_to_scheduler
from agentspec.backends.vllm.runner_v2.retrieval import PassageRetriever, SampledTokens
from agentspec.backends.vllm.runner_v2.speculator import PassageSpeculator
from agentspec.cache import SuffixCache
from agentspec.types import Namespace
from tests.backends.conftest import opening

RUNNER, WORKER = "vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.worker_base"
VOCABULARY, REQUESTS, LONGEST, DRAFTED, EOS = 1000, 128, 256, 4, 1001


class NgramGPUSpeculator:
    """The part of vLLM's class that ours relies on."""

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        self.device, self.req_states = device, req_states
        self.max_num_reqs, self.max_model_len, self.num_speculative_steps = REQUESTS, LONGEST, DRAFTED


class GPUModelRunner:
    """The part of vLLM's class that ours listens to."""

    def __init__(self, speculator: PassageSpeculator) -> None:
        self.speculator = speculator

    def add_requests(self, scheduler_output: object) -> None:
        """Handles them."""

    finish_requests = shutdown = add_requests


class RequestStates:
    """The part of vLLM's `RequestState` that is read."""

    def __init__(self) -> None:
        self.all_token_ids = SimpleNamespace(gpu=torch.zeros((REQUESTS, LONGEST), dtype=torch.int32))
        self.total_len = SimpleNamespace(gpu=torch.zeros(REQUESTS, dtype=torch.int32))
        self.req_id_to_index: dict[str, int] = {}


class Late:
    """Makes a step's tokens arrive on the host only once `steps` further steps have been prepared."""

    def __init__(self) -> None:
        self._steps = 0
        self._copies: list[SampledTokens] = []
        self._changed = threading.Condition()
        self._awaited: SampledTokens | None = None

    @property
    def steps(self) -> int:
        return self._steps

    @steps.setter
    def steps(self, steps: int) -> None:
        with self._changed:
            self._steps = steps
            self._changed.notify_all()

    def begun(self, copy: SampledTokens) -> None:
        with self._changed:
            self._copies.append(copy)
            self._changed.notify_all()

    def arrived(self, copy: SampledTokens) -> bool:
        return len(self._copies) - self._copies.index(copy) > self._steps

    def wait(self, copy: SampledTokens) -> None:
        with self._changed:
            self._awaited = copy
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self.arrived(copy), 60)
            self._awaited = None

    def settle(self, retriever: PassageRetriever) -> None:
        """Wait until all that has arrived is taken in and searched for, as in the time that a step takes."""
        if missing := next((copy for copy in self._copies if not self.arrived(copy)), None):
            with self._changed:
                assert self._changed.wait_for(lambda: self._awaited is missing, 60)
        else:
            assert retriever.flush()
            self._copies.clear()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Late:
    found, copying = Late(), SampledTokens.__init__

    def begun(self: SampledTokens, *given: Any) -> None:
        copying(self, *given)
        found.begun(self)

    monkeypatch.setattr(SampledTokens, "__init__", begun)
    monkeypatch.setattr(SampledTokens, "arrived", lambda self: found.arrived(self))
    monkeypatch.setattr(SampledTokens, "wait", lambda self: found.wait(self))
    return found


class Runner:
    """Runs requests whose answers are given."""

    def __init__(self, speculator: PassageSpeculator, late: Late) -> None:
        self.late, self.vllm = late, sys.modules[RUNNER].GPUModelRunner(speculator)
        self.speculator, self.states = speculator, speculator.req_states
        self.answers: dict[str, list[int]] = {}
        self.rows: dict[str, int] = self.states.req_id_to_index
        self.drafts: dict[str, list[int]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.steps = 0
        self.verified = DRAFTED  # of the drafted tokens

    def begin(self, identity: str, prompt: Sequence[int], answer: Sequence[int], done: int = 0, **more: Any) -> None:
        """Begin a request, or resume it after `done` tokens of its answer."""
        text = [*prompt, *answer[:done]]
        row = next(row for row in range(REQUESTS) if row not in self.rows.values())
        self.states.all_token_ids.gpu[row, : len(text)] = torch.tensor(text, dtype=torch.int32)
        self.states.total_len.gpu[row] = len(text)
        self.rows[identity], self.answers[identity] = row, list(answer)
        self.outputs[identity], self.drafts[identity] = list(answer[:done]), []
        new = new_request(identity, list(prompt), text, **{"max_tokens": len(answer), **more})
        self.vllm.add_requests(SimpleNamespace(scheduled_new_reqs=[new]))
        self.settle()  # as if reading the prompt took time

    def finish(self, *identities: str) -> None:
        self.vllm.finish_requests(SimpleNamespace(finished_req_ids={*identities}, preempted_req_ids=None))
        for identity in identities:
            del self.rows[identity]

    def preempt(self, identity: str) -> None:
        """Its blocks are needed: it begins anew later."""
        self.vllm.finish_requests(SimpleNamespace(finished_req_ids=set(), preempted_req_ids={identity}))
        del self.rows[identity]

    def step(self, settle: bool = True) -> None:
        """Verify each request's draft, sample one token more, and draft. The next step may come before the search."""
        self.steps += 1
        identities = list(self.rows)
        sampled = [self._sampled(identity) for identity in identities]
        counts = torch.tensor([len(tokens) for tokens in sampled], dtype=torch.int32)
        rows = torch.tensor([self.rows[identity] for identity in identities], dtype=torch.int32)
        batch = SimpleNamespace(req_ids=identities, num_reqs=len(identities), idx_mapping=rows)
        batch.idx_mapping_np = rows.numpy()
        verified = torch.tensor([len(self.drafts[identity]) for identity in identities])
        rejected = (verified + 1 - counts).clamp(min=0)
        some = {} if self.verified == DRAFTED else {"num_speculative_tokens": self.verified}
        drafts = self.speculator.propose(batch, None, None, None, None, counts, rejected, None, **some)
        for identity, draft in zip(identities, drafts.tolist(), strict=True):
            self.drafts[identity] = draft[: self.verified]
        if settle:
            self.settle()

    def settle(self) -> None:
        assert self.speculator._retriever is not None
        self.late.settle(self.speculator._retriever)

    def run(self) -> dict[str, list[int]]:
        """Step until all answers are there, then end the requests."""
        while any(len(self.outputs[identity]) < len(self.answers[identity]) for identity in self.rows):
            self.step()
        found = {identity: self.outputs[identity] for identity in self.rows}
        self.finish(*self.rows)
        return found

    def _sampled(self, identity: str) -> list[int]:
        row, output = self.rows[identity], self.outputs[identity]
        following = self.answers[identity][len(output) :]
        equal = [drafted == token for drafted, token in zip(self.drafts[identity], following, strict=False)]
        right = equal.index(False) if False in equal else len(equal)
        fresh = following[: right + 1]
        length = int(self.states.total_len.gpu[row])
        self.states.all_token_ids.gpu[row, length : length + len(fresh)] = torch.tensor(fresh, dtype=torch.int32)
        self.states.total_len.gpu[row] = length + len(fresh)
        output.extend(fresh)
        return fresh


def new_request(identity: str, prompt: list[int] | None, text: list[int], **more: Any) -> Any:
    """The part of vLLM's `NewRequestData` that is read."""
    given = {"salt": None, "xargs": {}, "max_tokens": None, "stop": [], "embeds": None, "seed": None, **more}
    sampling = SimpleNamespace(extra_args=given["xargs"], eos_token_id=EOS, stop_token_ids=[])
    sampling.max_tokens, sampling.stop = given["max_tokens"], given["stop"]
    sampling.seed, sampling.temperature = given["seed"], 1.0
    new = SimpleNamespace(req_id=identity, prompt_token_ids=prompt, prefill_token_ids=text, lora_request=None)
    new.sampling_params, new.prompt_embeds = sampling, given["embeds"]
    setattr(new, SALT, given["salt"])
    return new


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """vLLM's tensor-parallel group: one rank, and not broadcasting."""
    group = SimpleNamespace(world_size=1, rank_in_group=0, sent=[])
    group.broadcast = lambda tensor, src: group.sent.append((tensor.tolist(), src))
    for name in ("vllm", "vllm.distributed", "vllm.distributed.parallel_state", RUNNER, WORKER):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    vars(sys.modules[RUNNER])["GPUModelRunner"] = type("GPUModelRunner", (GPUModelRunner,), {})  # to be patched
    vars(sys.modules[WORKER])["WorkerBase"] = type("WorkerBase", (), {})
    listen_to_scheduler()
    parallel = sys.modules["vllm.distributed.parallel_state"]
    monkeypatch.setattr(parallel, "get_tp_group", lambda: group, raising=False)
    monkeypatch.setattr(parallel, "model_parallel_is_initialized", lambda: True, raising=False)
    return group


@pytest.fixture
def runner(ranks: SimpleNamespace, cache: SuffixCache, late: Late, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    opened = opening(cache, lambda name: Namespace(name, "m", "t"), pepper="team")
    monkeypatch.setattr(retrieval, "open_retriever", lambda _, shape, __: PassageRetriever(opened, VOCABULARY, shape))
    ours = type("Speculator", (PassageSpeculator, NgramGPUSpeculator), {})
    made = ours(None, torch.device("cpu"), RequestStates())
    yield Runner(made, late)
    late.steps = 0
    made.close()


def text(seed: int, length: int) -> list[int]:
    """Tokens that do not repeat by chance."""
    return np.random.default_rng(seed).permutation(VOCABULARY)[:length].tolist()


@pytest.fixture
def retriever(runner: Runner) -> PassageRetriever:
    assert runner.speculator._retriever is not None
    return runner.speculator._retriever
