"""The README's Python blocks, executed as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
NEEDS_MODEL = "ChatAgentSpec"


def run(block: str) -> str:
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_is_a_block_for_each_door_in_python() -> None:
    assert len(BLOCKS) == 3
    assert sum(NEEDS_MODEL in block for block in BLOCKS) == 2


def test_the_cache_block_prints_what_it_says() -> None:
    (block,) = [block for block in BLOCKS if NEEDS_MODEL not in block]
    assert run(block) == "[5 6 7]\n"


@pytest.mark.model
def test_the_chat_model_block_answers() -> None:
    (block,) = [block for block in BLOCKS if NEEDS_MODEL in block and "@agentspec.step" not in block]
    assert run(block).strip()


@pytest.mark.slow
@pytest.mark.model
def test_the_decorator_block_prints_a_report() -> None:
    (block,) = [block for block in BLOCKS if "@agentspec.step" in block]
    assert "plan" in run(block)
