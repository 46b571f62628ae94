"""How commands read files of recorded calls and documents: options, progress and bad lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from agentspec.cli.common import plural
from agentspec.recordings.calls import BadLineError, OnBad, refuse
from agentspec.recordings.formats import Format, files_of

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")


Advance = Callable[..., None]
"""`advance(what, count)` advances the progress bar of `what`, which then has `total=...` steps if it is given."""
Files = Annotated[list[Path], typer.Argument(metavar="FILE", exists=True, help="Files, or folders of them")]
FormatOption = Annotated[
    Format | None, typer.Option("--format", help="What the files hold [default: found by looking]")
]
SkipOption = Annotated[bool, typer.Option("--skip-bad", help="Leave out lines that cannot be read, naming each")]


def found(files: list[Path], console: Console) -> list[Path]:
    """`files`, with each folder replaced by the files in it whose format is known; their number is printed."""
    unknown: list[Path] = []
    known = [file for path in files for file in files_of(path, unknown.append)]
    if unknown:
        rest = f"{plural(len(unknown), 'file')} of no known format left out, such as {unknown[0]}"
        console.print(rest, markup=False, highlight=False, soft_wrap=True)
    return known


def choose(skip_bad: bool, console: Console) -> tuple[OnBad, list[BadLineError]]:
    """The handler of bad lines, and the list of bad lines that it has skipped so far."""
    bad: list[BadLineError] = []

    def skip(error: BadLineError) -> None:
        bad.append(error)
        console.print(f"left out: {error}", markup=False, highlight=False, soft_wrap=True)

    return (skip if skip_bad else refuse), bad


def counted(items: Iterator[T], what: str, advance: Advance) -> Iterator[T]:
    for item in items:
        advance(what, 1)
        yield item


@contextmanager
def progress() -> Iterator[tuple[Console, Advance]]:
    """Show progress bars on stderr; `advance(what, count)` creates the bar of `what` at the first call."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    console = Console(stderr=True)
    narrow = Column(no_wrap=True, max_width=console.width // 3)  # leaves room for the counts next to a long path
    name = TextColumn("{task.description}", markup=False, table_column=narrow)
    columns = (BarColumn(console.width // 4), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(name, *columns, console=console) as bars:
        tasks: dict[str, Any] = {}

        def advance(what: str, count: int, *, total: int | None = None) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.advance(tasks[what], count)

        yield console, advance
