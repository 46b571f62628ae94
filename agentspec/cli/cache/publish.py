"""`agentspec cache publish` puts the segments of a cache where new machines find them."""

from __future__ import annotations

from typing import Annotated

import typer

from agentspec.cli.cache.folder import PathOption, folder_of, remote_of, shown
from agentspec.cli.common import ConfigOption, JsonOption, load, print_json


def publish(
    remote: Annotated[
        str | None, typer.Option(help="Folder or URL such as s3://bucket/x [default: cache.remote]")
    ] = None,
    config: ConfigOption = None,
    path: PathOption = None,
    json: JsonOption = False,
) -> None:
    """Publish the segments of a cache on a database server now. Servers with cache.remote do so by themselves."""
    from agentspec.cache import SuffixCache
    from agentspec.errors import ConfigurationError

    settings = load(config)
    folder, chosen = folder_of(settings, path), remote or remote_of(settings, path)
    if chosen is None:
        raise ConfigurationError("there is nowhere to publish segments: give --remote, or set cache.remote")
    memory = int(settings.cache.memory_bytes)
    with SuffixCache.open(folder, mode="follower", memory_bytes=memory, remote=chosen) as opened:
        count = opened.publish()
    if json:
        print_json({"published": count, "remote": shown(chosen)})
        return
    typer.echo(f"published {count} segment{'' if count == 1 else 's'} of {shown(folder)} at {shown(chosen)}")
