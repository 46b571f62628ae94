"""The parts of a run on a GPU, with stand-ins for the programs: what is run, again and in vain, and what is read."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentspec.benchmarks.gpu import bench as local
from agentspec.benchmarks.gpu.parts import COMMANDS, PYTHON, command_of, prepare, run
from agentspec.benchmarks.vllm import bench as forced
from agentspec.cli import app

SECONDS = {"ngram_gpu": 3.0, "agentspec V2": 2.0, "Arctic": 2.5}
RUNS = {name: {"seconds": seconds, "equal": True} for name, seconds in SECONDS.items()}
FOUND = json.dumps({"shape": "8b", "device": "a GPU", "calls": [{"runs": RUNS, **RUNS["Arctic"]}] * 8})
PROGRAM = f"""#!/bin/sh
echo "$@" >> asked
case "$*" in *"--at-once 32"*) exit 3;; *"--at-once 128"*) sleep 600;; esac
for out; do :; done
case "$*" in *"with EAGLE"*) echo '{{"failed": {{"EAGLE": "no device"}}}}' > "$out"; exit 1;; esac
echo '{FOUND}' > "$out"
"""


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def folder(tmp_path: Path, calls_of: Any, tokenizer: Path) -> Path:
    prepare(tmp_path / "gpu", [calls_of("airline", ["so it is"] * 3)], tokenizer, dry=True)
    for program in ("vllm/bin/agentspec", "sglang/bin/python"):
        write_program(tmp_path / "gpu" / "env" / program, PROGRAM)
    return tmp_path / "gpu"


def test_the_script_needs_a_gpu_and_runs_the_parts_that_are_named(folder: Path) -> None:
    programs = folder / "programs"
    python = f"programs/{PYTHON}"
    for name, text in (("programs/nvidia-smi", "exit 9"), ("env/vllm/bin/python", 'echo "$@"'), (python, "")):
        write_program(folder / name, text)
    for engine in ("vllm", "sglang"):
        (folder / "env" / engine / "complete").touch()

    def script() -> tuple[int, str]:
        environment = {"PATH": f"{programs}:{os.environ['PATH']}"}
        done = subprocess.run([folder / "run", "vllm-1"], env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    code, said = script()
    assert code == 1 and "need a GPU" in said
    (programs / "nvidia-smi").write_text("#!/bin/sh\n")
    assert script() == (0, "-P -m agentspec.benchmarks.gpu.parts run . vllm-1\n")
    for engine in ("vllm", "sglang"):
        (folder / "env" / engine / "complete").unlink()
    code, said = script()
    assert code == 1 and "No environment could be made" in said


def test_a_part_that_fails_does_not_hold_the_next_one_up(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, ["vllm-128"], seconds=0.01) == 1
    (folder / "env/vllm/bin/agentspec").write_text(PROGRAM.replace("sleep 600", "true"))
    assert run(folder, []) == 2
    said = capsys.readouterr().out
    assert "vllm-128: FAILED, it took more than 0.01 s" in said and "vllm-32: FAILED, with code 3" in said
    assert said.count(": done") == len(COMMANDS) - 2 and "hybrid: FAILED, EAGLE: no device: see" in said
    rows = json.loads((folder / "results.json").read_text())
    assert [row["ratio"] for row in rows] == [1.5, 1.5, None, 1.5, 1.25, 1.25, None, 1.0, 1.0]
    assert rows[0] == {
        "requests": 1, "drafter": "agentspec V2", "against": "ngram_gpu", "goal": 1.3, "shape": "8b",
        "device": "a GPU", "ratio": 1.5, "interval": [1.5, 1.5], "calls": 8, "equal": True,
    }  # fmt: skip
    asked = len((folder / "asked").read_text().splitlines())
    assert run(folder, []) == 2 and len((folder / "asked").read_text().splitlines()) == asked + 2


@pytest.mark.parametrize("name", [name for name in COMMANDS if not name.startswith("sglang")])
def test_each_part_is_a_command(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plans: list[Any] = []
    for module, function in ((forced, "run_forced"), (local, "run_gpu")):
        monkeypatch.setattr(module, function, lambda plan, progress: plans.append(plan) or pytest.exit.Exception())
    write_program(folder / "nvidia-smi", "echo 98304")  # MiB: too few for four of the largest model
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.chdir(folder)
    CliRunner().invoke(app, command_of(name, folder)[1:])
    (plan,) = plans
    assert plan.shape == ("8b" if name == "engine" else "3b") and plan.seconds == 200 and plan.traces[0].exists()
    assert name == "engine" or len(plan.chosen()) == 1 + COMMANDS[name].count("--variant")
