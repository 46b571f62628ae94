"""Rollouts of a trainer that runs vLLM in its own processes, in both model runners, and the examples of trainers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentspec.benchmarks.vllm.engine import FIXED
from tests.backends.vllm.test_server import ENVIRONMENT, RUNNERS
from tests.engine_server import HANG

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long,
    pytest.mark.timeout(HANG),
    pytest.mark.skipif(ENVIRONMENT is None, reason="no vLLM: run .ci/vllm-env, or set AGENTSPEC_VLLM_ENV"),
]


def environment(runner: str, drafts: bool) -> dict[str, str]:
    variables, speculative = RUNNERS[runner]
    given = {name: value for name, value in os.environ.items() if not name.startswith("AGENTSPEC_")}
    given |= {**FIXED, **variables, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return given | ({"AGENTSPEC_VLLM_SPECULATIVE_CONFIG": json.dumps(speculative)} if drafts else {})


def samples(model: Path, folder: Path, ranks: int, runner: str, drafts: bool) -> list[dict[str, Any]]:
    """What each rank has to say."""
    assert ENVIRONMENT is not None
    given = environment(runner, drafts)
    with socket.create_server(("127.0.0.1", 0)) as free:
        given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    command = [ENVIRONMENT / "bin" / "python", Path(__file__).with_name("rollouts_in_vllm.py"), model, str(ranks)]
    running, outputs = [], [folder / f"{runner}-{drafts}-{rank}" for rank in range(ranks)]
    for rank, out in enumerate(outputs):
        with out.with_suffix(".log").open("wb") as log:
            of_rank = {**given, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            running.append(subprocess.Popen([*command, out], env=of_rank, stdout=log, stderr=log))
    for process, out in zip(running, outputs, strict=True):
        assert process.wait(HANG) == 0, out.with_suffix(".log").read_text(errors="replace")[-3000:]
    logs = [out.with_suffix(".log").read_text(errors="replace") for out in outputs]
    assert sum("agentspec drafts for this server" in log for log in logs) == drafts, "the first rank drafts for all"
    return [json.loads(out.read_text()) for out in outputs]


@pytest.mark.parametrize(("runner", "ranks"), [("first", 2), ("V2", 1)])
def test_samples_stay_the_same_on_all_ranks_while_drafts_come_from_earlier_ones(
    served_model: Path, tmp_path: Path, runner: str, ranks: int
) -> None:
    (plain, *_), drafted = (samples(served_model, tmp_path, ranks, runner, drafts) for drafts in (False, True))
    assert plain["accepted"] == 0 and all(rank["rounds"] == plain["rounds"] for rank in drafted)
    assert all(rank["accepted"] > 30 for rank in drafted)


def python_with(package: str) -> Path:
    assert ENVIRONMENT is not None
    python = ENVIRONMENT / "bin" / "python"
    if subprocess.run([python, "-c", f"import {package}"], capture_output=True, check=False).returncode:
        pytest.skip(f"no {package} beside vLLM: run .ci/vllm-env")
    return python


def test_the_example_of_trl_trains_with_drafts(repository: Path, served_model: Path, tmp_path: Path) -> None:
    on_cpu = Path(__file__).with_name("trainer_on_cpu.py")
    example = repository / "examples" / "rollouts" / "with_trl.py"
    command = [python_with("trl"), on_cpu, example, served_model, "--updates", "3", "--length", "32"]
    given = environment("first", drafts=True) | {"VLLM_LOGGING_LEVEL": "INFO"}
    done = subprocess.run(command, env=given, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [float(line.split()[2]) for line in done.stdout.splitlines() if line.endswith(" a step")]
    assert len(steps) == 3 and min(steps) >= 1.0 and max(steps) > 1.0
    assert "agentspec drafts for this server" in done.stdout + done.stderr


def test_verl_takes_the_settings_of_its_example(repository: Path, served_model: Path, tmp_path: Path) -> None:
    example = repository / "examples" / "rollouts" / "with_verl.py"
    command = [python_with("verl"), example, served_model, "trainer.total_training_steps=2", "--cfg", "job"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    config = yaml.safe_load(done.stdout[done.stdout.index("actor_rollout_ref:") :])
    rollout = config["actor_rollout_ref"]["rollout"]
    speculative = rollout["engine_kwargs"]["vllm"]["speculative_config"]
    assert (speculative["method"], speculative["num_speculative_tokens"], rollout["n"]) == ("ngram_gpu", 7, 8)
    assert speculative["num_speculative_tokens_per_batch_size"] == [[1, 8, 7], [9, 32, 3], [33, 64, 1]]
    assert config["reward"]["custom_reward_function"]["path"] == str(example)
    assert config["trainer"]["total_training_steps"] == 2
