"""`agentspec trace` shows what a strategy decided for an answer, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentspec.cli.common import ConfigOption, JsonOption, load, print_json

if TYPE_CHECKING:
    from rich.text import Text

COLOURS = {"small": "green", "base": "blue"}
Record = Mapping[str, Any]
_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])  # all but tabs and line ends


def trace(
    name: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="The answer's speculation.trace; `last` is the newest")
    ] = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Print an answer of a strategy with each step coloured by who wrote it; without ID, all ids, newest first."""
    from agentspec.errors import ConfigurationError
    from agentspec.reasoning.delegation.trace import open_folder

    folder = open_folder(load(config).traces)
    if folder is None:
        raise ConfigurationError("no traces are kept: set path in [traces], then ask again")
    names = folder.ids()
    if name is None:
        if json:
            print_json(names)
        else:
            typer.echo("".join(f"{one}\n" for one in names), nl=False)
        return
    records = folder.read(names[0] if name == "last" and names else name)
    if json:
        print_json(records)
        return
    from rich.console import Console

    console = Console(highlight=False)
    for line in lines(records):
        console.print(line)


def passages(records: Sequence[Record]) -> Iterator[tuple[str, str, str]]:
    """(note, text, style) of the passages of a trace in order, dropped drafts included; a note has score and time."""
    proposed: Record | None = None
    noted = ""
    for record in records:
        match record["event"]:
            case "proposed":
                proposed = record["step"]
            case "scored":
                reason = f", {record['reason']}" if record["reason"] else ""
                noted = f"score {record['value']:.3g} in {record['seconds']:.2f} s{reason}"
            case "triggered":
                detail = f" ({record['detail']})" if record["detail"] else ""
                yield f"rule: {record['rule']}{detail}", "", ""
            case "failed":
                yield f"without {record['role']}: {record['reason']}", "", ""
            case "accepted" | "rewritten":
                step = record["step"]
                if proposed is not None and proposed != step:
                    yield f"{_beside(proposed, noted)}, dropped", proposed["text"], "dim strike"
                    noted = ""
                yield _beside(step, noted), step["text"], COLOURS[step["author"]]
                proposed, noted = None, ""
            case "ended":
                yield f"thinking over: {record['reason']}", "", ""
            case "answer":
                yield f"answer, done after {record['at']:.2f} s", record["text"], "default"


def lines(records: Sequence[Record]) -> Iterator[Text]:
    """The lines for a terminal: the heading and the request's messages, then each passage after its note."""
    from rich.text import Text

    yield Text(_title(records[0]), style="bold")
    for message in records[0]["messages"]:
        yield Text(_harmless(f"{message.get('role', '')}: {message.get('content', '')}"), style="italic")
    for note, text, style in passages(records):
        yield Text(_harmless(note), style="dim")
        if text:
            yield Text(_harmless(text.strip("\n")), style=style)


def _harmless(text: str) -> str:
    """`text` without control characters, which could steer the terminal."""
    return text.translate(_CONTROLS)


def _title(head: Record) -> str:
    knobs = ", ".join(f"{name} = {value}" for name, value in head["knobs"].items())
    return f"{head['model']}: {head['strategy']} ({knobs}), trace {head['trace']}"


def _beside(step: Record, noted: str) -> str:
    facts = f"{step['author']}, {step['tokens']} tokens in {step['seconds']:.2f} s"
    return f"{facts}, {noted}" if noted else facts
