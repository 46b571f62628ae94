"""A judge learns a planted rule, is kept with its model's fingerprint, and refuses pairs that teach nothing."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open

from agentspec.backends.model_store import resolve
from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch import TorchBackend
from agentspec.backends.torch.sampling.acceptance import JudgeHead, Substitutes
from agentspec.benchmarks.judge_training import JudgePair, labelled_states, main, train_judge
from agentspec.errors import ConfigurationError
from agentspec.types import LossyAcceptance, Source

pytestmark = pytest.mark.anyio
LETTERS, DIGITS = "abcdef", "01"


def planted(count: int, seed: int) -> list[JudgePair]:
    """Right answers are letters; a wrong one begins like its right one and ends in digits."""
    draw = random.Random(seed)

    def text(of: str, size: int) -> str:
        return "".join(draw.choice(of) for _ in range(size))

    return [JudgePair(text(LETTERS, 4), shared + text(LETTERS, 8), shared + text(DIGITS, 8))
            for shared in (text(LETTERS, 4) for _ in range(count))]  # fmt: skip


@pytest.fixture(scope="module")
def backend(saved_model: Path) -> Iterator[Any]:
    opened = TorchBackend.load(TorchSettings(model=str(saved_model), device="cpu", max_draft_tokens=0))
    yield opened
    asyncio.run(opened.aclose())  # others want its memory


async def test_it_learns_a_planted_rule(backend: TorchBackend, tmp_path: Path) -> None:
    head, report = await train_judge(backend, planted(40, seed=1))
    assert report.right_recall > 0.9 and report.wrong_recall > 0.9
    head.save(tmp_path / "head.safetensors")
    read = JudgeHead.load(tmp_path / "head.safetensors", fingerprint=backend.fingerprint, width=len(head.weight))
    states, labels = await labelled_states(backend, planted(1, seed=2)[0])
    assert torch.equal(read.scores(states), head.scores(states))
    sampler: Any = SimpleNamespace(constraints=None, may_draw=lambda token: True)
    judge = Substitutes(LossyAcceptance("judge", judge_head="head", threshold=0.5), sampler, read)
    judge.begin([0] * len(states), [Source.MODEL] * len(states), torch.cat([states[:1], states]))
    right, wrong = labels.nonzero().flatten().tolist(), (labels == 0).nonzero().flatten().tolist()
    taken = [judge.choose(0, [node]) is not None for node in (*right, *wrong)]
    assert sum(taken[: len(right)]) > 0.8 * len(right) and sum(taken[len(right) :]) < 0.2 * len(wrong)


@pytest.mark.parametrize(
    "pairs", [planted(4, seed=4), [JudgePair("q", "and so on", "and so")] * 6], ids=["few", "nothing wrong"]
)
async def test_pairs_that_teach_nothing_are_refused(backend: TorchBackend, pairs: list[JudgePair]) -> None:
    with pytest.raises(ConfigurationError, match="pairs"):
        await train_judge(backend, pairs)


def test_a_head_of_another_model_or_no_head_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    with pytest.raises(ConfigurationError, match="cannot be read"):
        JudgeHead.load(path, fingerprint="f", width=4)
    JudgeHead(torch.zeros(4), torch.tensor(0.0), "f").save(path)
    for fingerprint, width in (("other", 4), ("f", 5)):
        with pytest.raises(ConfigurationError, match="another model"):
            JudgeHead.load(path, fingerprint=fingerprint, width=width)
    path.write_bytes(b"no tensors")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        JudgeHead.load(path, fingerprint="f", width=4)


def test_a_judge_is_trained_for_a_backend(saved_model: Path, tmp_path: Path) -> None:
    settings = {"model": str(saved_model), "draft_model": "nobody/nothing"}
    config, out, pairs = tmp_path / "agentspec.toml", tmp_path / "judge.safetensors", tmp_path / "pairs.jsonl"
    config.write_text("[backends.local]\n" + "".join(f"{key} = {json.dumps(one)}\n" for key, one in settings.items()))
    lines = [{"prompt": "q", "accepted": f"ab{n}", "rejected": f"ac{n}"} for n in range(6)]
    pairs.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(ConfigurationError, match=r"no \[backends.nobody\]"):
        main([str(pairs), str(out), "--backend", "nobody", "--config", str(config)])
    assert not out.exists()
    main([str(pairs), str(out), "--backend", "local", "--config", str(config)])
    with safe_open(out, "pt") as head:
        assert head.metadata()["fingerprint"] == resolve(settings["model"]).fingerprint
