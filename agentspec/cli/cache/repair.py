"""`agentspec cache repair` mends the cache's database, and removes sequences that cannot be read from it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentspec.cli.cache.folder import PathOption, folder_of, shown
from agentspec.cli.common import ConfigOption, JsonOption, load, plural, print_json


def repair(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do it; without it all is only listed.")] = False,
    config: ConfigOption = None,
    path: PathOption = None,
    json: JsonOption = False,
) -> None:
    """List what is damaged, and with --yes build the database anew from all that can be read, without the sequences
    that cannot. Servers may use the database meanwhile.

    Nothing reads what goes, so that nothing is lost by it; all else stays as it is.
    """
    from agentspec.cache.storage.connection import opened_database

    folder = folder_of(load(config), path)
    with opened_database(folder) as database:
        faults = database.problems()
        lost = (database.mend() if yes else database.losses()) if faults else []
    found, removed = _rows(folder, remove=yes) if yes or not faults else ({}, 0)
    if json:
        report = {"faults": faults, "lost": lost or [], "unreadable": list(found.values()), "removed": removed}
        print_json(report)
        return
    for line in [*faults, *(lost or []), *found.values()]:
        typer.echo(line)
    typer.echo(_told(shown(folder), bool(faults), len(found), removed, yes=yes))


def _rows(folder: Path | str, *, remove: bool) -> tuple[dict[int, str], int]:
    """What is wrong with each sequence that cannot be read, and how many were removed."""
    from agentspec.cache.storage.sequence_store import SequenceStore

    store = SequenceStore.open(folder, disk_bytes=None, mode="follower")
    try:
        found = store.unreadable()
        return found, store.remove(found) if remove and found else 0
    finally:
        store.close()


def _told(place: str, faults: bool, found: int, removed: int, *, yes: bool) -> str:
    rows = plural(found, "sequence")
    if not faults and not found:
        return f"ok: every sequence in {place} can be read"
    if not yes:
        mended = "--yes builds it anew from all that can be read, without what is listed"
        return f"{place} is damaged; {mended}" if faults else f"{rows} cannot be read; --yes removes what is listed"
    built = f"{place} was built anew from all that could be read" if faults else ""
    gone = f"removed {removed} of {rows} that cannot be read" if found else ""
    left = "the others lie on pages that only the server's operator can mend" if removed < found else ""
    return "; ".join(filter(None, (built, gone, left)))
