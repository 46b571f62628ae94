"""Segments that machines share: each an immutable object, and a manifest written last that names the one in force.

Objects lie in a directory for each tenant. They are derived from the database, which tells whether one may be used: a
process that loads one drops what the database does not hold any more, and uses none that holds what was deleted.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO, cast
from urllib.parse import unquote

from agentspec.cache.deletion import Scope
from agentspec.cache.index import Frozen
from agentspec.cache.storage.remote.objects import SegmentObjects
from agentspec.cache.storage.segment_file import Segment, load_index, read_segment
from agentspec.cache.storage.segment_folder import LoadedSegment, SegmentFolder
from agentspec.errors import CacheDamagedError, CacheError, CacheFormatError

VERSION = 1
_MANIFEST, _OBJECT = ".json", ".segment"
_NAME = re.compile(
    r"(?P<place>[^/]+/[0-9a-f]{64})(?P<ending>\.json|\.[0-9a-f]{16}\.segment)(?P<part>\.[0-9a-f]{8}\.new)?"
)
_PLAIN = "abcdefghijklmnopqrstuvwxyz0123456789-_"
_MANIFEST_BYTES = 4096
_LONGEST = 160  # characters of a directory's name


@dataclass(frozen=True, slots=True)
class Manifest:
    """The segment in force of one namespace: the name of its object, its size and that of its head in bytes."""

    object: str
    size: int
    head_size: int

    def encode(self) -> bytes:
        return json.dumps({"version": VERSION, **asdict(self)}).encode()

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Raises `CacheFormatError`."""
        try:
            values = json.loads(data)
            if values.pop("version") != VERSION:
                raise CacheFormatError("its manifest is of another version")
            manifest = cls(**values)
            sizes = manifest.head_size, manifest.size
            if not isinstance(manifest.object, str) or {*map(type, sizes)} != {int} or not 0 < sizes[0] <= sizes[1]:
                raise ValueError("impossible values")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CacheDamagedError(f"its manifest: {error}") from None
        return manifest


@dataclass(slots=True)
class PublishedFiles:
    """What lies at the remote for one namespace."""

    has_manifest: bool = False
    objects: list[str] = field(default_factory=list)


class PublishedSegments(SegmentFolder):
    """The segments at `remote`. A failure to read one costs the time to rebuild it from the database, never more."""

    kept = True
    published = True

    def __init__(self, objects: SegmentObjects) -> None:
        super().__init__(Path(tempfile.gettempdir()))
        self._objects = objects
        self._places: dict[str, str] = {}  # by key, of the namespaces that have a segment as far as this process knows
        self._saving = threading.Lock()

    def late(self) -> int:
        return getattr(self._objects, "late", 0)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """No lock: whoever publishes looks for deletions afterwards, and whoever deletes lists objects afterwards."""
        yield

    def _listing(self) -> dict[str, PublishedFiles]:
        """What there is, by place: the directory of a tenant and the key of a namespace. Raises `OSError`."""
        found: defaultdict[str, PublishedFiles] = defaultdict(PublishedFiles)
        for name in self._objects.names():
            if match := _NAME.fullmatch(name):
                if match["ending"] == _MANIFEST and not match["part"]:
                    found[match["place"]].has_manifest = True
                else:
                    found[match["place"]].objects.append(name)
        self._places = {_key(place): place for place, there in found.items() if there.has_manifest}
        return found

    def namespaces(self) -> list[str]:
        try:
            self._listing()
        except OSError as error:
            self.failed("published segments cannot be looked for", error)
        return list(self._places)

    def total_bytes(self) -> int:
        return 0  # of this machine's disk

    def known_bytes(self) -> int:
        return 0

    def size(self, key: str) -> int:
        """1 if the namespace has a segment, as far as this process knows, else 0."""
        return int(key in self._places)

    def load(self, key: str, wanted: Callable[[Segment], bool]) -> LoadedSegment | None:
        place = self._places.get(key)
        if place is None:
            return None
        try:
            try:
                return self._load(place, wanted)
            except FileNotFoundError:  # replaced between manifest and object
                return self._load(place, wanted)
        except (OSError, CacheError) as error:
            self.skipped += 1
            self._places.pop(key, None)  # the writer publishes it anew
            self.failed(f"the published segment {place} is not used", error)
            return None

    def _load(self, place: str, wanted: Callable[[Segment], bool]) -> LoadedSegment | None:
        manifest = self._manifest(place)
        if not wanted(self._head(place, manifest)):
            return None
        with tempfile.TemporaryDirectory(prefix="agentspec-segment-") as folder:
            path = Path(folder) / "segment"
            self._objects.fetch(manifest.object, path, manifest.size)
            with path.open("rb", buffering=0) as file:  # mapped, so that it can be deleted
                if path.stat().st_size != manifest.size:
                    raise CacheDamagedError("it is cut off")
                segment = read_segment(file, _key(place))
                return LoadedSegment(segment, *load_index(file, segment))

    def _manifest(self, place: str) -> Manifest:
        manifest = Manifest.decode(self._objects.read(place + _MANIFEST, _MANIFEST_BYTES))
        named = _NAME.fullmatch(manifest.object)  # whoever can write there names no other file of this machine
        if not named or named["place"] != place or named["ending"] == _MANIFEST or named["part"]:
            raise CacheDamagedError("its manifest names what is not its own")
        return manifest

    def _head(self, place: str, manifest: Manifest) -> Segment:
        with tempfile.TemporaryFile() as file:
            file.write(self._objects.read(manifest.object, manifest.head_size))
            file.seek(0)
            return read_segment(cast("BinaryIO", file), _key(place))

    def save(self, segment: Segment, frozen: Frozen) -> None:
        """Publish a segment in place of the one of its namespace: the object first, then its manifest."""
        place = f"{directory_of(segment.namespace.tenant)}/{segment.namespace.key}"
        head, name = segment.head(), f"{place}.{secrets.token_hex(8)}{_OBJECT}"
        manifest = Manifest(name, len(head) + segment.index_bytes, len(head))
        with self._saving, tempfile.TemporaryDirectory(prefix="agentspec-segment-") as folder:
            path, before = Path(folder) / "segment", self._objects_before(place)
            with path.open("wb") as file:
                file.write(head)
                for part in frozen.parts:
                    file.write(part.data)
            self._send(path, manifest, place)
            self._places[segment.namespace.key] = place
            for old in before:
                self._objects.delete(old)
        self.error = None

    def _send(self, path: Path, manifest: Manifest, place: str) -> None:
        """Send the object in the file at `path`, then its manifest through the same file. Failed, no object stays."""
        try:
            self._objects.send(path, manifest.object)
            path.write_bytes(manifest.encode())
            self._objects.send(path, place + _MANIFEST)
        except BaseException:
            with suppress(OSError):
                self._objects.delete(manifest.object)
            raise

    def _objects_before(self, place: str) -> list[str]:
        """The objects that a new segment replaces."""
        try:
            return [self._manifest(place).object]
        except FileNotFoundError:
            return []
        except (OSError, CacheFormatError):  # a manifest that cannot be read
            return self._listing()[place].objects

    def delete(self, key: str) -> None:
        try:
            if place := self._places.pop(key, None):
                self._remove(place, self._listing()[place].objects)
                self._places.pop(key, None)
        except OSError as error:
            self.failed(f"the published segment of {key} cannot be deleted", error)

    def _remove(self, place: str, objects: Sequence[str]) -> None:
        for name in (place + _MANIFEST, *objects):
            self._objects.delete(name)

    def clear(self) -> None:
        """They take none of the room that is to be made."""

    def sweep(self) -> None:
        """Delete objects that no manifest names: a writer was killed before it wrote one."""
        with suppress(OSError):  # such objects do no harm
            for place, there in self._listing().items():
                if len(there.objects) > there.has_manifest:
                    kept = self._objects_before(place) if there.has_manifest else []
                    for name in {*there.objects} - {*kept}:
                        self._objects.delete(name)

    def invalidate(self, scope: Scope) -> None:
        """Delete every object that holds a sequence in scope, or may. Raises `CacheError` if one cannot be deleted."""
        try:
            self.withdraw(lambda segment: segment.covers(scope), scope.concerns_tenant)
        except OSError as error:
            raise CacheError(f"what is forgotten is still published, and cannot be deleted: {error}") from error

    def withdraw(
        self, unwanted: Callable[[Segment], bool], concerns: Callable[[str], bool] = lambda tenant: True
    ) -> None:
        """Delete the segments that are `unwanted`, or cannot be read, of all tenants that it `concerns`.

        Raises `OSError` if one cannot be deleted.
        """
        for place, there in self._listing().items():
            tenant = tenant_of(place.partition("/")[0])
            if (tenant is None or concerns(tenant)) and self._must_go(place, there, unwanted):
                self._remove(place, there.objects)
                self._places.pop(_key(place), None)

    def _must_go(self, place: str, there: PublishedFiles, unwanted: Callable[[Segment], bool]) -> bool:
        if not there.has_manifest or len(there.objects) > 1:  # nobody can tell what is in the others
            return True
        try:
            return unwanted(self._head(place, self._manifest(place)))
        except (OSError, CacheFormatError):
            return True


def _key(place: str) -> str:
    return place.rpartition("/")[2]


def directory_of(tenant: str) -> str:
    """The name of a tenant's directory: the same on file systems that tell capitals apart and those that do not."""
    name = "".join(chr(one) if chr(one) in _PLAIN else f"%{one:02X}" for one in tenant.encode(errors="surrogatepass"))
    return name if 0 < len(name) <= _LONGEST else f"~{hashlib.sha256(name.encode()).hexdigest()}"


def tenant_of(directory: str) -> str | None:
    """The tenant whose directory this is; None for one that is named by a hash."""
    return None if directory.startswith("~") else unquote(directory, errors="surrogatepass")
