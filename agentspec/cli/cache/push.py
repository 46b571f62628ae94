"""`agentspec cache push` feeds what the cache holds to a server that drafts by itself."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentspec.cli.cache.folder import PathOption, adapter_of, folder_of, reference_of
from agentspec.cli.common import ConfigOption, JsonOption, load, print_json
from agentspec.errors import CacheUnavailableError, ConfigurationError, UpstreamError
from agentspec.types import DEFAULT_TENANT

if TYPE_CHECKING:
    from agentspec.backends.http.endpoint import Endpoint
    from agentspec.backends.sglang.pushed_corpus import PushedCorpus
    from agentspec.backends.torch.text.model_text import ModelText
    from agentspec.cache.storage.sequence_store import SequenceStore

DEFAULT_TOKENS = 1_000_000


def push(
    sglang: Annotated[str, typer.Option(help="Address of an SGLang server that runs with NGRAM", metavar="URL")],
    model: Annotated[str, typer.Option(help="The model whose tokenizer the sequences were made with")],
    tenant: Annotated[str, typer.Option(help="Whose sequences, the server being theirs alone")] = DEFAULT_TENANT,
    tokens: Annotated[
        int, typer.Option(min=1, help="At most this many, of what was drafted from most")
    ] = DEFAULT_TOKENS,
    every: Annotated[float, typer.Option(min=0.0, help="Push again after this many seconds; 0 pushes once")] = 0.0,
    api_key_file: Annotated[Path | None, typer.Option(help="File with the server's key", dir_okay=False)] = None,
    config: ConfigOption = None,
    path: PathOption = None,
    json: JsonOption = False,
) -> None:
    """Give a tenant's most used answers to an SGLang server without our plug-in, as an external corpus to draft from.

    The server drafts from it for everybody. It needs --speculative-algorithm NGRAM and
    --speculative-ngram-external-sam-budget.
    """
    from agentspec.backends.sglang.pushed_corpus import PushedCorpus
    from agentspec.backends.torch.text.model_text import ModelText
    from agentspec.cache.storage.sequence_store import SequenceStore

    settings = load(config)
    folder = folder_of(settings, path)
    text = ModelText.load(reference_of(settings, model), adapter=adapter_of(settings, model))
    endpoint = _endpoint(sglang, api_key_file)
    corpus = PushedCorpus(endpoint, tenant)
    store = SequenceStore.open(folder, disk_bytes=None, mode="follower")
    try:
        while True:
            try:
                documents = _documents(store, text, tenant, tokens)
                _report(len(documents), _pushed(endpoint, corpus, documents), json)
            except (UpstreamError, CacheUnavailableError) as error:
                if not every:
                    raise
                typer.echo(f"agentspec: {error}; tried again in {every:g} s", err=True)
            if not every:
                return
            time.sleep(every)
    finally:
        store.close()


def _pushed(endpoint: Endpoint, corpus: PushedCorpus, documents: list[str]) -> int | None:
    import anyio

    async def run() -> int | None:
        try:
            return await corpus.push(documents)
        finally:
            await endpoint.leave_loop()

    return anyio.run(run)


def _documents(store: SequenceStore, text: ModelText, tenant: str, tokens: int) -> list[str]:
    """The texts of a tenant's most used sequences, each once."""
    rows = store.hottest(tenant, text.tokenizer_hash, tokens)
    texts = (text.tokenizer.decode(row.tokens.tolist()) for row in rows)
    return list(dict.fromkeys(found for found in texts if found))


def _endpoint(url: str, api_key_file: Path | None) -> Endpoint:
    from pydantic import ValidationError

    from agentspec.backends.http.endpoint import Endpoint
    from agentspec.backends.settings import OpenAISettings

    key = None if api_key_file is None else str(api_key_file)
    try:
        return Endpoint(OpenAISettings.model_validate({"base_url": url, "api_key_file": key}))
    except ValidationError as error:
        raise ConfigurationError(f"--sglang {url}: {error.errors()[0]['msg']}") from None


def _report(documents: int, loaded: int | None, json: bool) -> None:
    if json:
        print_json({"documents": documents, "tokens": loaded, "pushed": loaded is not None})
    elif loaded is None:
        typer.echo("nothing new")
    else:
        typer.echo(f"pushed {documents} answers, {loaded} tokens")
