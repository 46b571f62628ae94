# ruff: noqa: E402
"""Run by a Python with vLLM and Triton: texts of vLLM's own `Sampler` and, with drafts, of its `RejectionSampler`.

Its kernels run in Triton's interpreter, but that of `top_p`, in whose place vLLM has one in torch.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.backends

triton.backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.cpu.buffer_utils import UvaBuffer
from vllm.v1.worker.gpu import buffer_utils

buffer_utils.UvaBuffer, buffer_utils.is_uva_available = UvaBuffer, lambda: True

from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode import rejection_sampler
from vllm.v1.worker.gpu.states import RequestState

from agentspec.backends.vllm.runner_v2.verification import strict_rejection

WORDS, DRAFTED, LENGTH = 48, 4, 10
CPU, PROMPT = torch.device("cpu"), [1, 2, 3]
REQUESTS = [
    SamplingParams(temperature=temperature, top_p=top_p, presence_penalty=penalty, seed=seed, max_tokens=99)
    for seed in range(int(os.environ.get("SEEDS", "2")))
    for temperature in (0.3, 1.0)
    for top_p, penalty in ((1.0, 0.0), (0.9, 0.8))
]
TABLE = torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(0)) * 2  # logits after each token

Drafts = Callable[[int, list[int]], list[int]]


def batch(texts: list[list[int]], drafts: list[list[int]], rows: list[int]) -> Any:
    """What vLLM's samplers read of an `InputBatch`."""
    read = [[text[-1], *draft] for text, draft in zip(texts, drafts, strict=True)]
    sizes = np.array([len(tokens) for tokens in read])
    ends = np.concatenate(([0], sizes.cumsum())).astype(np.int32)
    ids = torch.tensor([token for tokens in read for token in tokens], dtype=torch.int32)
    local = torch.cat([torch.arange(size, dtype=torch.int32) for size in sizes])
    lengths = torch.tensor([len(text) for text in texts], dtype=torch.int32)
    mapping = torch.tensor(rows, dtype=torch.int32)
    found = SimpleNamespace(input_ids=ids, expanded_local_pos=local, idx_mapping=mapping, num_reqs=len(texts))
    found.positions = (lengths - 1).long().repeat_interleave(torch.tensor(sizes)) + local
    found.logits_indices, found.num_draft_tokens = torch.arange(len(ids)), len(ids) - len(texts)
    found.expanded_idx_mapping, found.idx_mapping_np = mapping.repeat_interleave(torch.tensor(sizes)), mapping.numpy()
    found.cu_num_logits, found.cu_num_logits_np = torch.from_numpy(ends), ends
    found.seq_lens = found.seq_lens_cpu_upper_bound = lengths + torch.tensor(sizes - 1, dtype=torch.int32)
    return found


def generate(drafts: Drafts) -> list[list[int]]:
    states = RequestState(len(REQUESTS), 64, 4096, DRAFTED, WORDS, CPU)
    config: Any = SimpleNamespace(reasoning_config=None)
    sampler = Sampler(config, len(REQUESTS), WORDS, CPU, states, num_speculative_tokens=DRAFTED + 1)
    rows = []
    for number, sampling in enumerate(REQUESTS):
        states.add_request(str(number), len(PROMPT), PROMPT, 0, 99)
        rows.append(states.req_id_to_index[str(number)])
        sampler.add_request(rows[-1], sampling)
    states.apply_staged_writes()
    sampler.apply_staged_writes()
    spec: Any = SimpleNamespace(num_speculative_tokens=DRAFTED, rejection_sample_method="standard")
    spec.enable_adaptive_verification, spec.fly_entropy_threshold, spec.fly_entropy_top_k = False, 0.0, 1
    rejection, texts = rejection_sampler.RejectionSampler(sampler, spec, CPU), [PROMPT.copy() for _ in REQUESTS]
    while min(map(len, texts)) < len(PROMPT) + LENGTH:
        given = batch(texts, [drafts(number, text) for number, text in enumerate(texts)], rows)
        out = (rejection if given.num_draft_tokens else sampler)(TABLE[given.input_ids.long()].clone(), given)
        for number, row in enumerate(rows):
            fresh = out.sampled_token_ids[number, : int(out.num_sampled[number])].tolist()
            texts[number] += fresh
            for token in fresh:  # as the runner does after each step
                sampler.penalties_state.output_bin_counts[row, token] += 1
    return [text[: len(PROMPT) + LENGTH] for text in texts]


if __name__ == "__main__":
    topk_topp_sampler.HAS_TRITON = False
    strict_rejection().strict = True
    random = Random(0)
    plain = generate(lambda number, text: [])
    assert len({tuple(text) for text in plain}) > len(plain) / 2, "these are no sampled texts"

    def warm(number: int, text: list[int]) -> list[int]:
        following = plain[number][len(text) : len(text) + DRAFTED]
        return [token if random.random() < 0.8 else random.randrange(WORDS) for token in following]

    assert generate(lambda number, text: [random.randrange(WORDS) for _ in range(DRAFTED)]) == plain
    assert generate(warm) == plain
