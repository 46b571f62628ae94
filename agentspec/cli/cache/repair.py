"""`agentspec cache repair` removes sequences that cannot be read from the cache's database."""

from __future__ import annotations

from typing import Annotated

import typer

from agentspec.cli.cache.folder import PathOption, folder_of, shown
from agentspec.cli.common import ConfigOption, JsonOption, load, print_json


def repair(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove them; without it they are only listed.")] = False,
    config: ConfigOption = None,
    path: PathOption = None,
    json: JsonOption = False,
) -> None:
    """List the sequences that cannot be read, and with --yes remove them. Servers may use the database meanwhile.

    Nothing reads such a sequence any more, so that nothing is lost by removing it; all others stay as they are.
    """
    from agentspec.cache.storage.sequence_store import SequenceStore

    folder = folder_of(load(config), path)
    store = SequenceStore.open(folder, disk_bytes=None, mode="follower")
    try:
        found = store.unreadable()
        removed = store.remove(found) if yes and found else 0
    finally:
        store.close()
    if json:
        print_json({"unreadable": list(found.values()), "removed": removed})
        return
    for problem in found.values():
        typer.echo(problem)
    plural = "" if len(found) == 1 else "s"
    if not found:
        typer.echo(f"ok: every sequence in {shown(folder)} can be read")
    elif yes:
        typer.echo(f"removed {removed} of {len(found)} sequence{plural} that cannot be read")
    else:
        typer.echo(f"{len(found)} sequence{plural} cannot be read; --yes removes what is listed")
