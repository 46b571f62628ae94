from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from agentspec.benchmarks import agent, decode, runs

SHORT = 40


@pytest.fixture(params=["tiny", pytest.param("smollm2-135m", marks=(pytest.mark.long, pytest.mark.model))])
def model(request: pytest.FixtureRequest, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a benchmark runs: a tiny model with short answers and transformers in a thread, or the default model."""
    if request.param != "tiny":
        return str(request.param)
    for module in (agent, decode):
        monkeypatch.setattr(module, "MAX_TOKENS", SHORT)
        monkeypatch.setattr(module, "GREEDY", replace(module.GREEDY, max_tokens=SHORT))
    monkeypatch.setattr(runs, "ProcessPoolExecutor", _thread)
    return str(tiny_model)


def _thread(workers: int, _context: Any, initializer: Any, arguments: Any) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, initializer=initializer, initargs=arguments)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A folder with a tokenizer of few words."""
    words = "[UNK] user assistant check the order again please and then".split()
    built = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    built.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    built.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    built.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


@pytest.fixture
def calls_of(tmp_path: Path) -> Callable[[str, list[str]], Path]:
    """Writes a file of recorded calls, one a session, that were answered so."""

    def write(name: str, answers: list[str]) -> Path:
        path = tmp_path / f"{name}.jsonl.gz"
        with gzip.open(path, "wt") as lines:
            for number, answer in enumerate(answers):
                delta = [{"role": "user", "content": "please check"}]
                call = {"session": f"{name}{number}", "messages_delta": delta, "response": answer}
                lines.write(json.dumps(call) + "\n")
        return path

    return write
