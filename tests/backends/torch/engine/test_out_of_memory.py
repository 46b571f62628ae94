"""Memory that really runs out: a program whose address space is limited loses one request and answers the next."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

PROGRAM = """
import asyncio, resource, sys
import torch
from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch import TorchBackend
from agentspec.errors import AgentSpecError
from agentspec.types import GenerateRequest, SamplingParams

torch.set_num_threads(1)
LENGTH, ROOM = 100_000, 200 << 20


async def answer(backend, prompt):
    request = GenerateRequest("m", token_ids=prompt, sampling=SamplingParams(temperature=0, max_tokens=4))
    return [token async for delta in backend.generate(request) for token in delta.token_ids]


async def main():
    backend = TorchBackend.load(TorchSettings(model=sys.argv[1], device="cpu"))
    before = await answer(backend, [1, 2, 3])
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, -1))
    try:
        await answer(backend, [1] * LENGTH)
        print("no error")
    except AgentSpecError as error:
        print("error:", error)
    assert await answer(backend, [1, 2, 3]) == before
    assert backend.stats().failed == 1
    print("answered again")
    await backend.aclose()


asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits the address space as Linux does")
def test_a_request_too_large_for_the_memory_fails_alone(tmp_path: Path, byte_tokens: object) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259, hidden_size=512, intermediate_size=32, num_hidden_layers=1, num_attention_heads=8,
        max_position_embeddings=1 << 20, bos_token_id=None, eos_token_id=256,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    byte_tokens.save_pretrained(tmp_path)  # type: ignore[attr-defined]
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = done.stdout.strip().splitlines()[-2:]
    assert first.startswith("error:") and "memory" in first and second == "answered again"
