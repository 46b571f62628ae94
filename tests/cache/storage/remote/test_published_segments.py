"""Segments that machines share, over a PostgreSQL server: what a node drafts, and what deletions leave there."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from agentspec.cache import SuffixCache
from agentspec.cache.deletion import select
from agentspec.cache.storage.remote.objects import FolderObjects, SegmentObjects, open_objects
from agentspec.cache.storage.remote.published_segments import Manifest, PublishedSegments, directory_of, tenant_of
from agentspec.errors import CacheDamagedError, CacheError, ConfigurationError

if TYPE_CHECKING:
    from conftest import Server

TENANTS = ("a", "Tenant B")


@pytest.fixture
def remote(tmp_path: Path) -> str:
    return str(tmp_path / "remote")


def outputs(seed: int = 0, count: int = 12) -> list[list[int]]:
    """Texts that repeat each other in parts."""
    drawn = np.random.default_rng(seed)
    pieces = [drawn.integers(1, 60, 8).tolist() for _ in range(6)]
    return [[token for piece in drawn.integers(0, 6, 6) for token in pieces[piece]] for _ in range(count)]


def fill(cache: SuffixCache, seed: int = 0, count: int = 12) -> None:
    for tenant in TENANTS:
        for number, output in enumerate(outputs(seed)[:count]):
            with cache.request([number + 1], namespace=tenant, session=f"s{number % 3}") as request:
                request.extend(output)
    cache.flush()


def drafts(cache: SuffixCache, seed: int = 0) -> list[Any]:
    found = []
    for tenant in TENANTS:
        for output in outputs(seed):
            with cache.request([7, 8, *output[:5]], namespace=tenant, store=False) as request:
                draft = request.draft(24)
                found.append((draft.tokens.tolist(), draft.parents.tolist()))
    return found


def published(address: str, remote: str, seed: int = 0) -> list[Any]:
    """Fill a cache and publish its segments; returns its drafts."""
    with SuffixCache.open(address, remote=remote) as cache:
        fill(cache, seed)
        assert cache.publish() == len(TENANTS)
        return drafts(cache, seed)


def names(remote: str) -> list[str]:
    return sorted(open_objects(remote).names())


def wait(condition: Callable[[], object], seconds: float = 120.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.02)


@pytest.mark.parametrize("kind", ["folder", "memory"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_a_new_node_opens_warm_and_drafts_as_the_source(postgres: str, remote: str, kind: str, seed: int) -> None:
    if kind == "memory":
        pytest.importorskip("fsspec")
        remote = f"memory://{uuid.uuid4().hex}/cache"
    expected = published(postgres, remote, seed)
    assert len(names(remote)) == 2 * len(TENANTS)
    with SuffixCache.open(postgres, mode="follower", remote=remote) as node:
        stats = node.stats()
        assert stats.segment_bytes > 0 and stats.segments_skipped == 0 and stats.sequences == 12 * len(TENANTS)
        assert drafts(node, seed) == expected
    with SuffixCache.open(postgres, mode="follower") as without:
        assert without.stats().segment_bytes == 0 and drafts(without, seed) == expected
    if kind == "folder":
        with SuffixCache.open(postgres, mode="follower", remote=f"file://{remote}") as node:
            assert node.stats().segment_bytes > 0


def test_what_came_since_is_read_from_the_database(postgres: str, remote: str) -> None:
    published(postgres, remote)
    with SuffixCache.open(postgres) as cache:
        fill(cache, seed=1, count=1)  # few: as much as the segment has would be merged with all of it
        expected = drafts(cache, seed=1)
    with SuffixCache.open(postgres, mode="follower", remote=remote) as node:
        assert node.stats().segment_bytes > 0 and drafts(node, seed=1) == expected


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def change_manifest(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("ending", "damage"),
    [
        (".segment", Path.unlink),
        pytest.param(".segment", lambda path: path.write_bytes(path.read_bytes()[:-8]), marks=pytest.mark.slow),
        (".segment", lambda path: flip(path, -1)),
        pytest.param(".segment", lambda path: flip(path, 100), marks=pytest.mark.slow),
        pytest.param(".json", lambda path: path.write_text("{"), marks=pytest.mark.slow),
        pytest.param(".json", lambda path: change_manifest(path, version=2), marks=pytest.mark.slow),
        (".json", lambda path: change_manifest(path, object="a/other")),
        pytest.param(".json", lambda path: change_manifest(path, head_size=8), marks=pytest.mark.slow),
    ],
    ids=["missing", "cut off", "flipped", "head flipped", "no JSON", "of the future", "another object", "short head"],
)
def test_what_is_damaged_is_left_out_and_published_anew(
    postgres: str, remote: str, ending: str, damage: Callable[[Path], object]
) -> None:
    expected = published(postgres, remote)
    damage(next((Path(remote) / "a").glob(f"*{ending}")))
    with SuffixCache.open(postgres, mode="follower", remote=remote) as node:
        stats = node.stats()
        assert stats.segments_skipped == 1 and stats.segment_error is not None and stats.segment_bytes > 0
        assert drafts(node) == expected
    with SuffixCache.open(postgres, remote=remote) as writer:
        assert writer.publish() == len(TENANTS)
    assert len(names(remote)) == 2 * len(TENANTS)
    with SuffixCache.open(postgres, mode="follower", remote=remote) as node:
        assert node.stats().segments_skipped == 0 and drafts(node) == expected


@pytest.mark.parametrize("object", ["{place}./../../../precious", "{place}.json", "{other}"])
def test_a_manifest_names_no_file_but_its_own(tmp_path: Path, object: str) -> None:
    """Else whoever can write to the folder would have every publisher delete any file of its machine."""
    remote, precious = tmp_path / "remote", tmp_path / "precious"
    segments, place = PublishedSegments(FolderObjects(remote)), f"a/{'0' * 64}"
    precious.write_bytes(b"precious")
    (remote / f"{place}.").mkdir(parents=True)
    name = object.format(place=place, other=f"b/{'1' * 64}.{'0' * 16}.segment")
    (remote / f"{place}.json").write_bytes(Manifest(name, 100, 50).encode())
    with pytest.raises(CacheDamagedError, match="not its own"):
        segments._manifest(place)
    assert segments._objects_before(place) == []
    (remote / f"{place}.json").write_bytes(b"[" * 100_000)
    with pytest.raises(CacheDamagedError):
        segments._manifest(place)


# Privacy: what is forgotten is at no remote.


def test_a_tenants_objects_go_with_the_tenant(postgres: str, remote: str) -> None:
    published(postgres, remote)
    with SuffixCache.open(postgres, mode="follower", remote=remote) as node:
        assert node.forget(tenant="a") == 12
        assert {name.partition("/")[0] for name in names(remote)} == {directory_of("Tenant B")}
        assert node.forget(session="s1") == 4 and names(remote) == []


@pytest.mark.parametrize("ending", ["json", f"{'0' * 16}.segment"])
def test_what_a_killed_process_left_half_sent_goes_too(tmp_path: Path, ending: str) -> None:
    segments, key = PublishedSegments(FolderObjects(tmp_path)), "0" * 64
    for tenant in ("a", "b"):
        left = tmp_path / tenant / f"{key}.{ending}.{'1' * 8}.new"
        left.parent.mkdir()
        left.write_bytes(b"half")
    segments.invalidate(select(tenant="a").scope)
    assert [name[:2] for name in names(str(tmp_path))] == ["b/"]
    segments.sweep()
    assert names(str(tmp_path)) == []


def test_retention_reaches_the_remote(postgres: str, remote: str) -> None:
    published(postgres, remote)
    with SuffixCache.open(postgres, remote=remote, retention=0.0):
        assert names(remote) == []


def test_the_writer_withdraws_what_others_forget_who_know_of_no_remote(postgres: str, remote: str) -> None:
    published(postgres, remote)
    with SuffixCache.open(postgres, mode="follower") as other:
        other.forget(tenant="a")
    assert len(names(remote)) == 2 * len(TENANTS)
    with SuffixCache.open(postgres, remote=remote) as writer, SuffixCache.open(postgres, mode="follower") as other:
        wait(lambda: len(names(remote)) == 2)
        other.forget(session="s0")
        wait(lambda: names(remote) == [] and writer.stats().sequences == 8)


def test_no_segment_with_deleted_sequences_is_used(postgres: str, remote: str) -> None:
    published(postgres, remote)
    with SuffixCache.open(postgres, mode="follower") as other:
        other.forget(session="s0")
    with SuffixCache.open(postgres, mode="follower") as other:
        expected = drafts(other)
    with SuffixCache.open(postgres, mode="follower", remote=remote) as node:
        assert drafts(node) == expected and node.stats().segment_bytes == 0 and names(remote) == []


class During(FolderObjects):
    """Objects that call `meanwhile` while a segment is sent."""

    meanwhile: Callable[[], object] | None = None

    def send(self, path: Path, name: str) -> None:
        if name.endswith(".segment") and (call := type(self).meanwhile):
            type(self).meanwhile = None
            call()
        super().send(path, name)


@pytest.fixture
def during(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[During]]:
    def opened(remote: str) -> SegmentObjects:
        return During(Path(remote))

    monkeypatch.setattr("agentspec.cache.storage.remote.open_objects", opened)
    yield During
    During.meanwhile = None


def test_a_deletion_while_a_segment_is_sent_reaches_it(postgres: str, remote: str, during: type[During]) -> None:
    with SuffixCache.open(postgres, remote=remote) as writer, SuffixCache.open(postgres, mode="follower") as other:
        fill(writer)
        during.meanwhile = lambda: other.forget(tenant="a")
        writer.publish()
        assert during.meanwhile is None
        assert {name.partition("/")[0] for name in names(remote)} <= {directory_of("Tenant B")}


def test_a_remote_that_cannot_be_changed_is_told_and_tried_again(
    postgres: str, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    published(postgres, remote)
    engine = sa.create_engine(postgres)
    files = "SELECT pg_relation_filenode(relid) FROM pg_partition_tree('sequences') WHERE isleaf"
    with SuffixCache.open(postgres, remote=remote) as writer, engine.connect() as connection:
        before = set(connection.execution_options(isolation_level="AUTOCOMMIT").exec_driver_sql(files).scalars())
        with monkeypatch.context() as patch:
            patch.setattr(FolderObjects, "delete", lambda *_: (_ for _ in ()).throw(PermissionError("no")))
            with pytest.raises(CacheError, match="still published"):
                writer.forget(tenant="a")
            assert writer.stats().sequences == 12, "the process itself knows it no more"
            assert len(names(remote)) == 2 * len(TENANTS)
            after = set(connection.exec_driver_sql(files).scalars())
            assert len(before - after) == 1, "what the database held of it is written anew all the same"
        wait(lambda: len(names(remote)) == 2)
    engine.dispose()


def test_a_remote_that_does_not_answer_costs_time_only(
    postgres: str, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = published(postgres, remote)

    def fails(*_: object) -> list[str]:
        raise TimeoutError("no answer")

    monkeypatch.setattr(FolderObjects, "names", fails)
    monkeypatch.setattr(FolderObjects, "send", fails)
    with SuffixCache.open(postgres, remote=remote) as cache:
        assert drafts(cache) == expected and "no answer" in str(cache.stats().segment_error)
        with pytest.raises(CacheError, match="cannot be published"):
            cache.publish()


def test_what_a_killed_writer_left_is_swept(postgres: str, remote: str) -> None:
    published(postgres, remote)
    before = names(remote)
    orphan = Path(remote) / next(name for name in before if name.endswith(".segment"))
    (orphan.parent / f"{orphan.name[:64]}.{'0' * 16}.segment").write_bytes(b"left behind")
    with SuffixCache.open(postgres, remote=remote):
        assert names(remote) == before


def test_segments_that_the_database_knows_nothing_of_go(server: Server, remote: str) -> None:
    """Two databases with one remote delete each other's segments, and use none of them."""
    published(server.address(), remote)
    (Path(remote) / "no segment").mkdir()
    (Path(remote) / "no segment" / "notes.txt").write_text("somebody's")
    with SuffixCache.open(server.address(), remote=remote) as other:
        assert names(remote) == ["no segment/notes.txt"]
        assert other.stats().sequences == 0 and other.stats().segment_error is None


@given(st.text(max_size=200), st.text(max_size=200))
def test_each_tenant_has_a_directory_of_its_own(one: str, other: str) -> None:
    directory = directory_of(one)
    assert "/" not in directory and directory not in ("", ".", "..") and len(directory) <= 160
    assert tenant_of(directory) in (one, None) and (tenant_of(directory) == one or not one or len(one) > 17)
    assert (directory.casefold() == directory_of(other).casefold()) is (one == other)


@pytest.mark.parametrize("path", ["folder", None])
def test_a_remote_needs_a_database_server(tmp_path: Path, path: str | None) -> None:
    with pytest.raises(ConfigurationError, match=r"cache\.remote"):
        SuffixCache.open(path and tmp_path / path, remote=str(tmp_path / "remote"))


def test_nothing_is_published_without_a_remote(postgres: str) -> None:
    with SuffixCache.open(postgres) as cache, pytest.raises(ConfigurationError, match="nowhere to publish"):
        cache.publish()
