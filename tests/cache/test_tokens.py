from __future__ import annotations

import numpy as np
import pytest

from agentspec.cache.tokens import as_tokens
from agentspec.errors import InvalidRequestError


@pytest.mark.parametrize("value", [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3]), np.array([1, 2, 3], dtype=np.uint8)])
def test_integers_become_int32(value: object) -> None:
    tokens = as_tokens(value)  # type: ignore[arg-type]
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [1, 2, 3]


def test_an_int32_array_is_not_copied() -> None:
    array = np.arange(5, dtype=np.int32)
    assert np.shares_memory(as_tokens(array), array)


def test_strided_arrays_become_contiguous() -> None:
    tokens = as_tokens(np.arange(10, dtype=np.int32)[::2])
    assert tokens.flags.c_contiguous
    assert tokens.tolist() == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("value", [[], (), np.zeros(0)])
def test_nothing_is_an_empty_array(value: object) -> None:
    assert as_tokens(value).dtype == np.int32  # type: ignore[arg-type]
    assert len(as_tokens(value)) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value",
    [
        [1.0, 2.0],
        [True, False],
        ["a"],
        [[1, 2], [3, 4]],
        [[1], [2, 3]],
        np.zeros((2, 2), dtype=np.int32),
        [-1],
        [2**31 - 1],
        np.array([5, 2**31 - 1], dtype=np.int32),
        np.array([2**31 - 1], dtype=np.uint32),
        [2**31],
        [2**70],
        5,
        None,
    ],
)
def test_what_are_not_token_ids_is_refused(value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        as_tokens(value, "prompt")  # type: ignore[arg-type]
    assert caught.value.param == "prompt"
