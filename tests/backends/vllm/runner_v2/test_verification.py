"""Sampled texts are the same with drafts, whatever is drafted; by vLLM's own classes: strict_in_vllm.py."""

from __future__ import annotations

import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentspec.backends.vllm.runner_v2.verification import CertainDrafts, StrictRejection
from agentspec.benchmarks.vllm.engine import find_environment

WORDS, DRAFTED, REQUESTS, LENGTH = 12, 3, 4, 12
TABLE = torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(0)) * 2
ENVIRONMENT = find_environment(Path(__file__).parents[4])


def gumbel_sample(logits: Tensor, rows: Tensor, temperature: Tensor, seed: Tensor, pos: Tensor, **how: Any) -> Tensor:
    """In the place of vLLM's kernel: noise by the request's seed and the position alone; none for a row of -1."""
    assert how == {"apply_temperature": False, "is_drafting": False, "use_fp64": True}
    drawn = []
    for values, row, position in zip(logits, rows.tolist(), pos.tolist(), strict=True):
        random = torch.Generator().manual_seed(int(seed[row]) * 1009 + position)
        noise = -torch.log(-torch.log(torch.rand(WORDS, generator=random)))
        drawn.append((values + noise * (row >= 0 and bool(temperature[row] > 0))).argmax())
    return torch.stack(drawn)


def generate(
    rejection: StrictRejection,
    seeds: list[int],
    temperature: float,
    drafts: Any,
    draft_logits: Tensor | None = None,
    length: int = LENGTH,
) -> list[list[int]]:
    """Texts of requests that lie in other rows than they have in the batch."""
    rows = torch.arange(len(seeds), dtype=torch.int32).flip(0)
    seed, temperatures = torch.tensor(seeds).flip(0), torch.full((len(seeds),), temperature)
    texts = [[0] for _ in seeds]
    while min(map(len, texts)) <= length:
        read = [[text[-1], *drafts(number, text)] for number, text in enumerate(texts)]
        sizes = torch.tensor([len(tokens) for tokens in read])
        tokens = torch.tensor([token for tokens in read for token in tokens])
        starts = torch.cat((torch.zeros(1), sizes.cumsum(0))).int()
        local = torch.cat([torch.arange(size) for size in sizes.tolist()])
        pos = torch.tensor([len(text) - 1 for text in texts]).repeat_interleave(sizes) + local
        logits = TABLE[tokens.clamp(min=0)] / (temperature or 1.0)
        batch = (logits, draft_logits, tokens, starts, pos, rows, rows.repeat_interleave(sizes), local)
        sampled, counts = rejection(*batch, temperatures, seed, DRAFTED, None, use_fp64=True)
        for text, new, count in zip(texts, sampled.tolist(), counts.tolist(), strict=True):
            text.extend(new[:count])
    return [text[: length + 1] for text in texts]


def theirs(target_logits: Tensor, draft_logits: Tensor, *batch: Any, **how: Any) -> tuple[Tensor, Tensor]:
    """A rejection sampler that writes 7."""
    return torch.full((len(batch[3]), DRAFTED + 1), 7), torch.ones(len(batch[3]), dtype=torch.int32)


@settings(max_examples=25)
@given(
    seeds=st.lists(st.integers(0, 2**40), min_size=1, max_size=REQUESTS),
    temperature=st.sampled_from([0.0, 0.3, 1.0]),
    right=st.floats(0.0, 1.0),
    random=st.randoms(use_true_random=False),
)
def test_the_text_with_drafts_is_the_text_without(
    seeds: list[int], temperature: float, right: float, random: Any
) -> None:
    strict = StrictRejection(theirs, gumbel_sample)
    strict.strict = True
    plain = generate(strict, seeds, temperature, lambda number, text: [])

    def drafts(number: int, text: list[int]) -> list[int]:
        """Of any length; -1 is vLLM's mark for what is to be refused."""
        following = plain[number][len(text) : len(text) + random.randint(0, DRAFTED)]
        return [token if random.random() < right else random.randint(-1, WORDS - 1) for token in following]

    assert generate(strict, seeds, temperature, drafts) == plain


def test_drafts_are_accepted_as_often_as_the_target_gives_them() -> None:
    strict, draws = StrictRejection(theirs, gumbel_sample), 1000
    strict.strict = True
    probabilities = torch.softmax(TABLE[0], -1)
    token = int(probabilities.argsort()[-2])
    texts = generate(strict, list(range(draws)), 1.0, lambda number, text: [token], length=1)
    shares = torch.bincount(torch.tensor([text[1] for text in texts]), minlength=WORDS) / draws
    assert torch.allclose(shares, probabilities, atol=0.05)


def test_a_models_drafts_are_left_to_vllm() -> None:
    """Rows that we drafted have the target's draws, for which no other row's vocabulary is read."""
    read = list[int]()

    def draw(logits: Tensor, *states: Any, **how: Any) -> Tensor:
        read.append(len(logits))
        return gumbel_sample(logits, *states, **how)

    strict, model = StrictRejection(theirs, draw), torch.zeros(2, DRAFTED, WORDS)
    assert generate(strict, [1, 2], 1.0, lambda *_: [7], None)[0][1:] == [7] * LENGTH, "strict is not asked for"
    assert generate(strict, [1, 2], 1.0, lambda *_: [7], model)[0][1:] == [7] * LENGTH
    strict.ours[model.data_ptr()] = CertainDrafts(used := torch.tensor([True, False]), perhaps := set[int]())
    assert generate(strict, [1, 2], 1.0, lambda *_: [7], model)[0][1:] == [7] * LENGTH and not read
    perhaps.add(0)  # row 0, which is the batch's second request
    texts = generate(strict, [1, 2], 1.0, lambda *_: [7], model)
    assert set(read) == {DRAFTED + 1} and used[0]
    strict.strict = True
    assert texts[0][1:] == [7] * LENGTH and texts[1] == generate(strict, [1, 2], 1.0, lambda *_: [7])[1]
    assert any(a != b for a, b in pairwise(texts[1]))


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(ENVIRONMENT is None, reason="no vLLM: run .ci/vllm-env, or set AGENTSPEC_VLLM_ENV")
def test_in_vllms_own_sampler() -> None:
    assert ENVIRONMENT is not None
    script = Path(__file__).with_name("strict_in_vllm.py")
    done = subprocess.run([ENVIRONMENT / "bin" / "python", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
