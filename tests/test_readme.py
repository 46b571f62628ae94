"""The README's Python blocks, and the first of the cache's page, executed as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def blocks_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


BLOCKS = blocks_of("README.md")


def run(block: str) -> str:
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_is_a_block_for_each_door_in_python() -> None:
    assert len(BLOCKS) == 2


def test_the_cache_block_prints_what_it_says() -> None:
    assert run(blocks_of("docs/cache.md")[0]) == "[5 6 7]\n"


@pytest.mark.long
@pytest.mark.model
def test_the_chat_model_block_answers() -> None:
    (block,) = [block for block in BLOCKS if "@agentspec.step" not in block]
    assert run(block).strip()


@pytest.mark.long
@pytest.mark.model
def test_the_decorator_block_prints_a_report() -> None:
    (block,) = [block for block in BLOCKS if "@agentspec.step" in block]
    assert "plan" in run(block)
