"""`agentspec knn` builds KNN-LM datastores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentspec.cli.common import ModelOption

if TYPE_CHECKING:
    from rich.console import Console

    from agentspec.reasoning.retrieval.knn.build import Progress

app = typer.Typer(help="Build a KNN-LM datastore.", no_args_is_help=True)


@app.callback()
def knn() -> None:
    """Build a KNN-LM datastore."""


@app.command()
def build(
    corpus: Annotated[
        list[Path],
        typer.Argument(metavar="CORPUS.jsonl...", exists=True, dir_okay=False, help="JSON lines with text; .gz too"),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the datastore; an unfinished one is gone on with")],
    model: ModelOption = "smollm2-135m",
) -> None:
    """Read a corpus with a model and keep the hidden state before every token: 2 bytes a number, on disk."""
    import anyio
    from rich.console import Console

    from agentspec.backends.settings import TorchSettings
    from agentspec.backends.torch import TorchBackend
    from agentspec.reasoning.retrieval.knn.build import Corpus
    from agentspec.reasoning.retrieval.knn.build import build as build_store

    console = Console(stderr=True)
    with console.status("loading the model"):
        backend = TorchBackend.load(TorchSettings(model=model, max_draft_tokens=0))

    async def run() -> None:
        try:
            with progress_bar(console) as bar:
                source = Corpus(tuple(corpus))
                manifest = await build_store(source, out, backend, backend.model_name, backend.encode, bar)
            typer.echo(f"{out}: {manifest.entries} entries of {manifest.documents} documents")
        finally:
            await backend.aclose()

    anyio.run(run)


@contextmanager
def progress_bar(console: Console) -> Iterator[Callable[[Progress], None]]:
    """A progress bar of documents, with the number of entries and the time remaining."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("documents, {task.fields[entries]} entries"))
    with Bar(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("", total=None, entries=0)
        yield lambda now: bar.update(task, total=now.total, completed=now.documents, entries=now.entries)
