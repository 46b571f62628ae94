from __future__ import annotations

import json

import pytest

from agentspec.protocol.responses import BLOCK, obfuscated


@pytest.mark.parametrize("length", [0, 1, 100, BLOCK - 30, BLOCK - 29, BLOCK - 28, BLOCK, 3 * BLOCK])
@pytest.mark.parametrize("text", ["x", "é", "\n"])
def test_events_are_filled_to_whole_blocks(length: int, text: str) -> None:
    data = obfuscated({"a": text * length})
    read = json.loads(data)
    assert len(data) % BLOCK == 0 and read.pop("obfuscation") is not None and read == {"a": text * length}


def test_filling_is_random() -> None:
    assert obfuscated({"a": 1}) != obfuscated({"a": 1})
