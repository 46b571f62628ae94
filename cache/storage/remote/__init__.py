"""Segments in a folder that machines share, or in an object store, for caches on a database server."""

from __future__ import annotations

from agentspec.cache.storage.database import Database
from agentspec.cache.storage.remote.deadline import BoundedObjects
from agentspec.cache.storage.remote.objects import open_objects
from agentspec.cache.storage.remote.published_segments import PublishedSegments
from agentspec.cache.storage.segment_folder import NoSegmentFolder, SegmentFolder
from agentspec.errors import ConfigurationError


def open_segments(database: Database, remote: str | None) -> SegmentFolder:
    """The segments of a database: beside it in its folder, or for a database server at `remote`, if that is given.

    Raises `ConfigurationError` for a `remote` that cannot be used.
    """
    if remote is None:
        return SegmentFolder(database.folder) if database.folder else NoSegmentFolder()
    if database.folder:
        message = "cache.remote needs a database server in cache.path: a folder has its segments beside its database"
        raise ConfigurationError(message, param="remote")
    return PublishedSegments(BoundedObjects(open_objects(remote)))
