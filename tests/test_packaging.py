from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
KINDS = (".py", ".pyi", ".html", ".css", ".js", ".svg")
LINKED = ("backends", "benchmarks", "cache", "reasoning")


def built(folder: Path, *options: str) -> Path:
    """The sdist, and the wheel that is built from it, with the build tools of this environment and no network."""
    command = [sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", str(folder), str(ROOT)]
    environment = os.environ | {"PIP_NO_INDEX": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without the extension, which takes most of the time."""
    return built(tmp_path_factory.mktemp("dist"), "-Cwheel.cmake=false")


@pytest.fixture(scope="module")
def sdist(archives: Path) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(next(archives.glob("*.tar.gz"))) as archive:
        return {member.name.partition("/")[2]: member for member in archive.getmembers()}


def sources() -> set[str]:
    """Every Python file of the package as it is imported, the typing files, and the files of the gateway's page."""
    package = ROOT / "agentspec"
    found = [path for folder in (package, *(package / name for name in LINKED)) for path in folder.rglob("*.*")]
    wanted = {str(path.relative_to(ROOT)) for path in found if path.suffix in KINDS}
    return wanted | {"agentspec/py.typed"}


def test_the_links_lead_to_the_root_folders():
    for name in LINKED:
        assert os.readlink(ROOT / "agentspec" / name) == f"../{name}"


@pytest.mark.slow
def test_the_sdist_holds_every_source_as_a_real_file(sdist):
    assert sources() <= set(sdist)
    assert all(sdist[name].isfile() for name in sources())
    assert {"agentspec/cache/_native.pyi", "CMakeLists.txt", "cache/native/bindings.cpp", "LICENSE"} <= set(sdist)


@pytest.mark.slow
def test_the_sdist_holds_nothing_else_that_grows_in_a_working_tree(sdist):
    junk = re.compile(r"(^|/)(\.venv|\.git|\.ci|build|dist|__pycache__|\.[a-z]+_cache|\.hypothesis)(/|$)|\.(so|pyc)$")
    assert [name for name in sdist if junk.search(name)] == []


@pytest.mark.slow
def test_the_wheel_holds_every_source_but_no_c_code(archives):
    names = names_in(next(archives.glob("*.whl")))
    assert sources() <= names
    assert "agentspec/cache/_native.pyi" in names
    assert [name for name in names if name.endswith((".cpp", ".hpp", ".so.py"))] == []
    assert {name.partition("/")[0] for name in names} == {"agentspec", "agentspec_inference-0.1.0.dist-info"}


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.mark.long
def test_the_wheel_with_its_extension_works_outside_the_tree(tmp_path):
    wheel = next(built(tmp_path / "dist").glob("*.whl"))
    assert f"agentspec/cache/_native{sysconfig.get_config_var('EXT_SUFFIX')}" in names_in(wheel)
    target = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", f"--target={target}"]
    subprocess.run([*command, str(wheel)], check=True)
    program = (
        "import agentspec, agentspec.cache, agentspec.backends.model_store, agentspec.reasoning\n"
        "from agentspec.cache import SuffixCache\n"
        "with SuffixCache.open() as cache, cache.request([1, 2, 3, 1, 2]) as request:\n"
        "    print(agentspec.__file__, list(request.draft(max_tokens=1).tokens))"
    )
    # Without the site module, this environment's editable install does not stand in the way.
    paths = os.pathsep.join([str(target), sysconfig.get_path("platlib"), sysconfig.get_path("purelib")])
    result = subprocess.run(
        [sys.executable, "-S", "-c", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(str(target))


def test_no_file_advises_to_install_the_package_index_project_of_the_same_name():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]
    advice = re.compile(rb"\bpipx? install\b[^\n|#]*[\s'\"`]agentspec(?![\w./-])|\bagentspec\[[a-z]")
    assert [path for path in files if advice.search(path.read_bytes())] == []


def test_every_dependency_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines if not line.startswith("#")}
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    wanted += [item for extra in project["project"]["optional-dependencies"].values() for item in extra]
    # Engines have environments of their own; .ci/vllm-env pins vLLM's.
    elsewhere = {"agentspec-inference", "vllm", "sglang"}
    names = {re.split(r"[<>=\[]", item)[0].lower() for item in wanted} - elsewhere
    assert names <= pinned
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines if not line.startswith("#"))
    assert "torch==2.13.0" in lines


def test_the_lock_has_a_hash_for_every_pinned_package_but_torch():
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    entries = re.split(r"\n(?=[\w.-]+==)", (ROOT / "requirements.lock").read_text())[1:]
    locked = {entry.split(" ")[0]: re.findall(r"--hash=sha256:([0-9a-f]+)", entry) for entry in entries}
    normal = {
        re.sub(r"[-_.]+", "-", name).lower(): version for name, _, version in (pin.partition("==") for pin in pins)
    }
    assert {f"{name}=={version}" for name, version in normal.items() if name != "torch"} == set(locked)
    assert all(hashes and {len(one) for one in hashes} == {64} for hashes in locked.values())
    assert "index" not in (ROOT / "requirements.lock").read_text() and "://" not in "".join(entries)


def test_the_programs_entry_point_is_installed():
    result = subprocess.run(
        [Path(sys.executable).with_name("agentspec"), "--version"], capture_output=True, text=True, check=True
    )
    assert re.fullmatch(r"agentspec \d+\.\d+\.\d+\n", result.stdout)
