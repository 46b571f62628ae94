"""A whole SGLang server with our drafter inside, on a CPU. Its environment is made by `.ci/sglang-env`.

SGLang's kernels for CPUs are in no wheel: `cpu/sgl_kernel.py` has them in torch. There SGLang verifies trees without
overlap, and all requests greedily.
"""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.backends.conftest import stored_in
from tests.engine_server import HANG, EngineServer

PYTHON = Path(os.environ.get("AGENTSPEC_SGLANG_ENV") or Path(__file__).parents[3] / ".venv-sglang") / "bin" / "python"
PROMPTS = [[*b"Two plus two"], [*b"def add(a, b):"], [*b"{{{{{{{{"]]
TOKENS = 32
TREES = ("--speculative-num-draft-tokens", "16")
CHAINS = ("--speculative-num-draft-tokens", "8", "--speculative-ngram-max-bfs-breadth", "1")
VARIABLES = {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONSAFEPATH": "1", "PYTHONPATH": str(Path(__file__).with_name("cpu"))}

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
        command = [str(PYTHON), "-m", "sglang.launch_server", "--model-path", str(served_model), "--device", "cpu"]
        command += ["--speculative-algorithm", "NGRAM", "--dtype", "float32", "--max-total-tokens", "4096"]
        command += ["--skip-tokenizer-init", "--skip-server-warmup"]
        log = tmp_path / f"{len(started)}.log"
        started.append(EngineServer([*command, *options], log, VARIABLES | variables))
        return started[-1].start()

    yield launch
    for server in started:
        server.kill()


def say(server: EngineServer, **more: Any) -> tuple[list[list[int]], float]:
    """Greedy answers to all prompts at once, and their tokens a step."""
    sampling = {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True}
    asked = json.dumps({"input_ids": PROMPTS, "sampling_params": sampling, **more}).encode()
    request = urllib.request.Request(f"{server.url}/generate", asked, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=HANG) as answer:
        found = json.load(answer)
    steps = sum(one["meta_info"]["spec_verify_ct"] for one in found)
    return [one["output_ids"] for one in found], TOKENS * len(PROMPTS) / steps


def greedy(folder: Path) -> list[list[int]]:
    """The model's own answers, without a server."""
    model = LlamaForCausalLM.from_pretrained(folder)
    model.generation_config.eos_token_id = None
    answers = [model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False) for prompt in PROMPTS]
    return [answer[0, len(prompt) :].tolist() for answer, prompt in zip(answers, PROMPTS, strict=True)]


def test_the_model_says_the_same_in_fewer_steps_by_trees_and_after_a_kill_by_chains(
    launch: Launch, served_model: Path, tmp_path: Path
) -> None:
    cache, plain = tmp_path / "cache", greedy(served_model)
    server = launch(*TREES, AGENTSPEC_CACHE_PATH=str(cache), AGENTSPEC_SGLANG_SALTS='{"pepper": "other"}')
    assert server.text().count("agentspec drafts for this server, in the place of NGRAM") == 1
    assert say(server)[0] == plain
    warm, tokens_per_step = say(server)
    assert warm == plain and tokens_per_step > 3
    for salt in ("pepper", "unknown"):
        assert say(server, cache_salt=salt)[0] == plain
    while len(stored_in(cache)) < 3 * len(plain):
        time.sleep(0.1)
    server.kill()
    server = launch(*CHAINS, AGENTSPEC_CACHE_PATH=str(cache))
    again, tokens_per_step = say(server)
    assert again == plain and tokens_per_step > 3
    server.stop()
    assert stored_in(cache) == sorted(plain * 4)
