"""What tests of the plug-ins share: a cache for the requests of an engine, and the source of released engines."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agentspec.backends.engine_plugin import cache_router, drafter  # what an engine opens by its own configuration
from agentspec.backends.engine_plugin.request_state import RequestState
from agentspec.backends.engine_plugin.settings import DrafterSettings
from agentspec.cache import CacheRequest, SuffixCache
from agentspec.cache.storage.codec import decode
from agentspec.types import Namespace

KEPT = (".py", ".cpp", ".h")
NEWEST = ["newest"] if os.environ.get("AGENTSPEC_NEWEST_ENGINES") else []  # of the index, beside pinned releases
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_34_x86_64")

Unpack = Callable[[str, str], Path]


@pytest.fixture(scope="session")
def served_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of bytes, with heads as wide as engines have them and as many as two ranks share."""
    config = LlamaConfig.from_pretrained(tiny_model, hidden_size=96, head_dim=64, num_attention_heads=6)
    config.num_key_value_heads, config.intermediate_size = 2, 192
    folder = tmp_path_factory.mktemp("models") / "served"
    shutil.copytree(tiny_model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.manual_seed(3)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def opening(cache: SuffixCache, namespace: Callable[[str], Namespace] = Namespace, **salts: str) -> Any:
    """Opens requests on `cache`, in the namespace that their salt names, as a plug-in opens them."""
    return cache_router.CacheRouter(cache, DrafterSettings(salts=salts), namespace, None).open


def followed_requests() -> Counter[str]:
    """The objects of requests in this process, also those that earlier tests have left."""
    kinds = (RequestState, CacheRequest)
    gc.collect()
    return Counter(type(one).__name__ for one in gc.get_objects() if isinstance(one, kinds))


def stored(cache: SuffixCache, namespace: str | Namespace = "default") -> list[list[int]]:
    """The outputs in the cache's index, in order."""
    with cache.request([1], namespace=namespace) as request:
        shared = request.indexes[1][0]
    return sorted(shared.tokens(number).tolist() for number in shared.oldest(2**40).tolist())


def rows_in(folder: Path, columns: str) -> Sequence[Any]:
    """Those of the sequences in the database of a server."""
    with sa.create_engine(f"sqlite:///{folder}/sequences.sqlite3").connect() as database:
        return database.execute(sa.text(f"SELECT {columns} FROM sequences")).all()


def stored_in(folder: Path) -> list[list[int]]:
    """The outputs in the database of a server, in order."""
    return sorted(decode(row).tokens.tolist() for row in rows_in(folder, "*"))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that wait for their drafts however busy the machine is: here it matters what is found, not when."""
    monkeypatch.setattr(drafter, "PATIENCE", 60.0)


@pytest.fixture(scope="session")
def released() -> Unpack:
    """Returns the package folder of a released wheel: only its source, unpacked, not installed, kept between runs.
    The `newest` is downloaded in each.
    """
    fresh: set[Path] = set()

    def unpack(name: str, version: str) -> Path:
        kept = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentspec-tests"
        folder = kept / f"{name}-{version}"
        if version in NEWEST and folder not in fresh:
            shutil.rmtree(folder, ignore_errors=True)
            fresh.add(folder)
        if not folder.is_dir():
            kept.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=kept) as scratch:
                source = Path(scratch, "source")
                wanted = name if version in NEWEST else f"{name}=={version}"
                _extract(_download(wanted, Path(scratch)), source)
                shutil.move(source, folder)
        return folder / name

    return unpack


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    platforms = [f"--platform={platform}" for platform in PLATFORMS]
    done = subprocess.run([*command, "--python-version=3.11", *platforms, "--dest", str(folder), requirement])
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        assert not NEWEST, f"{requirement} cannot be downloaded"
        pytest.skip(f"{requirement} cannot be downloaded here")
    return wheels[0]


def _extract(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith(KEPT)])
