"""`agentspec kb build` makes knowledge bases on disk, and `agentspec knn build` datastores of KNN-LM."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal

import typer

from agentspec.cli.common import JsonOption, ModelOption, command_group, creatable, print_json
from agentspec.cli.recorded_files import SkipOption, choose, counted, progress
from agentspec.errors import ConfigurationError

app = command_group("Make knowledge bases.")
knn = command_group("Build a KNN-LM datastore.")


@app.command()
def build(
    corpus: Annotated[Path, typer.Argument(metavar="CORPUS", exists=True, dir_okay=False)],
    out: Annotated[
        Path, typer.Option(help="Folder to make; an index there is replaced", file_okay=False, callback=creatable)
    ],
    kind: Annotated[
        Literal["dense", "hnsw", "bm25"], typer.Option(help="Embeddings, the same by a graph, or words")
    ] = "dense",
    model: Annotated[str | None, typer.Option(help="Embedding model: a name or folder", show_default="minilm")] = None,
    skip_bad: SkipOption = False,
    json: JsonOption = False,
) -> None:
    """Index a corpus: JSON lines with "id", "text" and perhaps "title", plain or gzip.

    The folder is complete or not there; a process that has it open goes over to the new one when it starts again.
    """
    from agentspec.reasoning.retrieval.knowledge import folder
    from agentspec.reasoning.retrieval.knowledge.folder import load_encoder
    from agentspec.recordings.corpus import read_corpus

    if kind == "bm25" and model is not None:
        raise ConfigurationError("--kind bm25 searches by words: leave --model out", param="model")
    model = model or "minilm"
    folder.require_replaceable(out, folder.FILES)
    import_module("bm25s" if kind == "bm25" else "faiss")  # a missing extra is reported before the encoding
    with progress() as (console, advance):
        on_bad, bad = choose(skip_bad, console)
        documents = list(counted(read_corpus(corpus, on_bad), str(corpus), advance))
        encoder = None if kind == "bm25" else load_encoder(model)
        try:
            shown = partial(advance, total=len(documents))
            manifest = folder.build(documents, out, kind, encoder=encoder, model=_lasting(model), advance=shown)
        finally:
            if encoder is not None:
                encoder.close()
    if json:
        print_json(asdict(manifest) | {"version": manifest.version, "bad": len(bad)})
        return
    left_out = f", {len(bad)} lines left out" if bad else ""
    typer.echo(f"{out}: {manifest.documents} documents by {kind}, version {manifest.version[:12]}{left_out}")


def _lasting(model: str) -> str:
    """The absolute path of a model's folder; other names unchanged."""
    path = Path(model).expanduser()
    return str(path.absolute()) if path.exists() else model


@knn.command("build")
def build_datastore(
    corpus: Annotated[list[Path], typer.Argument(metavar="CORPUS", exists=True, dir_okay=False)],
    out: Annotated[
        Path,
        typer.Option(help="Folder to make; a datastore there is replaced", file_okay=False, callback=creatable),
    ],
    model: ModelOption = "smollm2-135m",
) -> None:
    """Read a corpus (JSON lines with "text") and store the hidden state before every token: 2 bytes a number."""
    import anyio

    from agentspec.reasoning.retrieval.datastore import FILES
    from agentspec.reasoning.retrieval.datastore import build as build_store
    from agentspec.reasoning.retrieval.knowledge.folder import require_replaceable
    from agentspec.recordings.corpus import read_texts

    require_replaceable(out, FILES)
    texts = [text for file in corpus for text in read_texts(file)]  # before torch is imported

    from agentspec.backends.settings import TorchSettings
    from agentspec.backends.torch import TorchBackend

    async def run() -> None:
        try:
            manifest = await build_store(texts, out, backend, partial(advance, "documents", total=len(texts)))
            typer.echo(f"{out}: {manifest.entries} entries of {manifest.documents} documents")
        finally:
            await backend.aclose()

    with progress() as (_, advance):
        backend = TorchBackend.load(TorchSettings(model=model, max_draft_tokens=0))
        anyio.run(run)
