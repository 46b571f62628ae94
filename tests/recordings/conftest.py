"""Sessions as each coding agent writes them, the same short conversation with a secret in every kind of place."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SESSIONS = Path(__file__).parent / "sessions"
# In the form of real keys, which were never issued.
SECRETS = {
    "asked": "sk-proj-a1B2c3D4e5F6g7H8i9J0k1L2",
    "written": "ghp_A1b2C3d4E5f6G7h8I9j0K1l2M3n4O5p6",
    "argument": "AKIA2E4G6I8K0M2O4Q6S",
    "result": "xoxb-123456789012-abcdefGHIJKL",
    "thought": "hf_AbCdEfGhIjKlMnOpQrStUvWx",
}


def claude_code(folder: Path) -> Path:
    """A copy of the session of Claude Code, in a folder as it makes them."""
    path = folder / "-p" / "s1.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(SESSIONS / "claude-code.jsonl", path))


@pytest.fixture(params=["claude-code", "codex", "log-of-responses", "log-of-messages"])
def recorded(request: pytest.FixtureRequest) -> tuple[str, Path]:
    """The format's name and a file of that format."""
    return request.param.split("-of")[0], SESSIONS / f"{request.param}.jsonl"


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write records, one a line, into a file."""

    def to(*records: Any, name: str = "f.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in records))
        return path

    return to
