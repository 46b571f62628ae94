"""The kernels draft what plain torch drafts: on a GPU, and on a CPU by Triton's interpreter. Skipped without Triton."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from agentspec.backends.vllm.runner_v2.matching import draft, last_sampled
from agentspec.backends.vllm.runner_v2.passages import PassageShape
from tests.triton_kernels import INTERPRETED, WITH_TRITON, compile_kernel, not_interpreted, run_interpreted

pytestmark = WITH_TRITON
on_gpu = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)
interpreted = pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="runs in a process of its own"))
on_each_device = pytest.mark.parametrize("device", [interpreted, on_gpu])


@not_interpreted
def test_in_a_process_with_the_interpreter() -> None:
    run_interpreted(__file__, passed=7)


POINTERS = dict.fromkeys(("own", "rows", "lengths", "sampled", "passages", "arrived", "ends", "chances"), "*i32")
POINTERS |= dict.fromkeys(("best", "drafts", "matches"), "*i64")
NUMBERS = {"own_stride": "i32", "columns": "i32"}
PASSAGES = {"COUNT": 4, "WIDTH": 63, "WIDTH_2": 64, "OVERLAP": 16}
SIZES = {**PASSAGES, "DEPTH": 16, "BLOCK": 256, "DRAFT": 7, "DRAFT_2": 8, "END": 9, "END_2": 16}


@not_interpreted
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_the_kernel_compiles_for_a_gpu(kernels: Any) -> None:
    compile_kernel(kernels._draft, {**POINTERS, **NUMBERS}, SIZES)


@pytest.fixture
def kernels() -> Any:
    from agentspec.backends.vllm.runner_v2 import matching_triton

    return matching_triton


def batch(seed: int, requests: int, columns: int, shape: PassageShape, alphabet: int) -> tuple[torch.Tensor, ...]:
    """Random texts of random lengths in more rows than there are requests, and passages that go on from them."""
    random = torch.Generator().manual_seed(seed)

    def numbers(low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high, size, generator=random, dtype=torch.int32)

    own = numbers(0, alphabet, requests + 2, columns)
    lengths = numbers(1, columns + 1, requests + 2)
    rows = torch.randperm(requests + 2, generator=random)[:requests].int()
    passages, chances = numbers(0, alphabet, 2, requests, shape.rows, shape.width)
    for request, row in enumerate(rows.tolist()):
        length = int(lengths[row])
        known = own[row, max(0, length - shape.overlap - 2) : max(1, length - 2)][-shape.overlap :]
        passages[request, 0, : len(known)] = known
    ends = numbers(0, shape.width + 1, requests, shape.rows, 1)
    passages.masked_fill_(torch.arange(shape.width) >= ends, -1)
    return own, lengths, rows, torch.stack((passages, chances), dim=1)


@on_each_device
@pytest.mark.parametrize("alphabet", [2, 50])
@pytest.mark.parametrize(("columns", "tokens"), [(40, 1), (256, 7), (700, 15)])
def test_the_kernel_drafts_as_plain_torch(kernels: Any, device: str, columns: int, tokens: int, alphabet: int) -> None:
    shape = PassageShape(rows=3, overlap=5, width=21, least=1)
    matcher = kernels.PassageMatcher(6, columns, tokens, shape, torch.device(device))
    for seed in range(3):
        own, lengths, rows, passages = (part.to(device) for part in batch(seed, 4, columns, shape, alphabet))
        drafts = torch.full((4, tokens), -5, device=device)
        index, sampled, held = rows.long(), torch.ones_like(lengths[:4]), torch.full((6, 126), -7).int().to(device)
        held[index], ends = passages.flatten(1), torch.zeros((6, tokens + 2), dtype=torch.int32, device=device)
        matches = torch.zeros(6, dtype=torch.int64, device=device)
        chances = torch.zeros((6, tokens), dtype=torch.int32, device=device)
        matcher.draft(own, lengths, rows, sampled, held, drafts, ends, matches, chances)
        assert torch.equal(ends[:4], last_sampled(own, lengths, index, sampled, tokens + 1)) and not ends[4:].any()
        plain, plain_match, plain_chances = draft(own[index], lengths[index], passages, shape.overlap, tokens)
        assert torch.equal(drafts, plain) and torch.equal(matches[:4], plain_match)
        assert torch.equal(chances[:4], plain_chances) and not chances[4:].any()


@on_each_device
def test_requests_that_read_their_prompt_get_their_last_token(kernels: Any, device: str) -> None:
    def numbers(*values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    shape = PassageShape(rows=1, overlap=1, width=4, least=1)
    drafts = torch.zeros((2, 2), dtype=torch.int64, device=device)
    matcher = kernels.PassageMatcher(2, 4, 2, shape, torch.device(device))
    passages, chances = torch.full((2, 8), -1, dtype=torch.int32, device=device), numbers([0, 0], [0, 0])
    own = numbers([1, 2, 1, 2], [3, 4, 3, 4])
    ends = torch.zeros((2, 4), dtype=torch.int32, device=device)
    matches = torch.zeros(2, dtype=torch.int64, device=device)
    matcher.draft(own, numbers(4, 4), numbers(0, 1), numbers(1, 0), passages, drafts, ends, matches, chances)
    assert drafts.tolist() == [[1, 2], [4, 4]] and matches.tolist() == [2, 0]
    assert ends.tolist() == [[1, 2, 1, 2], [0, 4, 3, 4]]
