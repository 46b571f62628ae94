"""Whole SGLang servers with our drafter inside, on a CPU. Their environment is made by `.ci/sglang-env`.

SGLang's kernels for CPUs are in no wheel: `cpu/sgl_kernel.py` has them in torch. There SGLang verifies trees without
overlap, and all requests greedily.
"""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.backends.conftest import stored_in
from tests.engine_server import HANG, EngineServer

PYTHON = Path(os.environ.get("AGENTSPEC_SGLANG_ENV") or Path(__file__).parents[3] / ".venv-sglang") / "bin" / "python"
PROMPTS = ["Two plus two", "def add(a, b):\n    return", "{" * 40, "The capital of France is"]
TREES = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "16")
VARIABLES = {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(Path(__file__).with_name("cpu"))}

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(HANG),
    pytest.mark.skipif(not PYTHON.exists(), reason="no SGLang: run .ci/sglang-env, and set AGENTSPEC_SGLANG_ENV"),
]

Launch = Callable[..., EngineServer]


@pytest.fixture
def launch(served_model: Path, tmp_path: Path) -> Iterator[Launch]:
    """Starts servers, and stops all at the end."""
    started = list[EngineServer]()

    def launch(*options: str, **variables: str) -> EngineServer:
        command = [str(PYTHON), "-m", "sglang.launch_server", "--model-path", str(served_model)]
        command += ["--device", "cpu", "--dtype", "float32", "--max-total-tokens", "8192", "--skip-server-warmup"]
        log = tmp_path / f"{len(started)}.log"
        started.append(EngineServer([*command, *options], log, VARIABLES | variables))
        return started[-1].start()

    yield launch
    for server in started:
        server.kill()


def complete(server: EngineServer, prompt: str, **more: Any) -> tuple[list[int], int]:
    """A greedy answer, and in how many steps a tree was verified."""
    asked = {"text": prompt, "sampling_params": {"temperature": 0.0, "max_new_tokens": 64, "ignore_eos": True}, **more}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}/generate", json.dumps(asked).encode(), headers)
    with urllib.request.urlopen(request, timeout=HANG) as answer:
        found = json.load(answer)
    return found["output_ids"], found["meta_info"].get("spec_verify_ct", 0)


def say(server: EngineServer) -> tuple[list[list[int]], float]:
    """Answers to all prompts at once, and their tokens a step."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(lambda prompt: complete(server, prompt), PROMPTS))
    texts, steps = [text for text, _ in answers], sum(steps for _, steps in answers)
    return texts, sum(map(len, texts)) / max(1, steps)


def test_trees_give_the_same_texts_in_fewer_steps_also_after_kill_and_restart(launch: Launch, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    server = launch()
    plain, _ = say(server)
    server.stop()
    server = launch(*TREES, AGENTSPEC_CACHE_PATH=str(cache), AGENTSPEC_SGLANG_SALTS='{"pepper": "other"}')
    assert server.text().count("agentspec drafts for this server, in the place of NGRAM") == 1
    assert say(server)[0] == plain
    warm, tokens_per_step = say(server)
    assert warm == plain and tokens_per_step > 3
    for salt in ("pepper", "unknown"):
        assert complete(server, PROMPTS[0], cache_salt=salt)[0] == plain[0]
    while len(stored_in(cache)) < 2 * len(plain) + 1:
        time.sleep(0.1)
    server.kill()
    server = launch(*TREES, AGENTSPEC_CACHE_PATH=str(cache))
    again, tokens_per_step = say(server)
    assert again == plain and tokens_per_step > 3
    server.stop()
    assert stored_in(cache) == sorted([*plain * 3, plain[0]])
