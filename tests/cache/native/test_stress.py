"""Random work on native indexes, by one thread against a naive model and by many, under the compiler's sanitizers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

# With what costs least, building and ten seeds together: UBSan's code is dear to optimise, TSan's is dear to run.
SANITIZERS = {"address": ["-Og", "-fsanitize=address,undefined"], "thread": ["-O1", "-fsanitize=thread"]}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> dict[str, Path]:
    """The programs built so far, by sanitizer; each takes half a minute to build."""
    return {"folder": tmp_path_factory.mktemp("stress"), "repository": repository}


def program(built: dict[str, Path], sanitizer: str) -> Path:
    if sanitizer not in built:
        compiler = shutil.which("c++")
        if compiler is None:
            pytest.skip("missed: no C++ compiler")
        native, path = built["repository"] / "cache" / "native", built["folder"] / sanitizer
        command = [compiler, "-std=c++20", "-g1", *SANITIZERS[sanitizer], "-pthread"]
        command += [
            "-fno-sanitize-recover=all",
            "-fno-omit-frame-pointer",
            "-Wl,--wrap=mmap",
            f"-I{Path(__file__).parent / 'small'}",
            f"-I{native}",
        ]
        command += [*map(str, Path(__file__).parent.glob("stress*.cpp")), "-o", str(path)]
        command.append(str(all_of(native, built["folder"])))
        subprocess.run(command, check=True)
        built[sanitizer] = path
    return built[sanitizer]


def all_of(native: Path, folder: Path) -> Path:
    """One source that includes all of the index's: each header is then read once, in half the time."""
    sources = sorted(source for part in ("drafting", "index", "storage") for source in native.glob(f"{part}/*.cpp"))
    one = folder / "native.cpp"
    one.write_text("".join(f'#include "{source}"\n' for source in sources))
    return one


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("seed", "operations", "outputs"),
    [
        *(pytest.param(seed, 1000, 300) for seed in range(3)),
        *(pytest.param(seed, 20_000, 10_000, marks=pytest.mark.long) for seed in range(20)),
    ],
)
@pytest.mark.parametrize(
    "sanitizer", [pytest.param("address", marks=pytest.mark.slow), pytest.param("thread", marks=pytest.mark.long)]
)
def test_random_work_agrees_with_a_model(
    built: dict[str, Path], sanitizer: str, seed: int, operations: int, outputs: int
) -> None:
    command = [str(program(built, sanitizer)), str(seed), str(operations), str(outputs)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "as the model says\n"), run.stderr[-4000:]
