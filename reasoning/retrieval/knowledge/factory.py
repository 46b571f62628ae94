"""Opens the knowledge base that a `[knowledge.NAME]` table describes."""

from __future__ import annotations

from agentspec.reasoning.retrieval.knowledge.base import KnowledgeBase
from agentspec.reasoning.retrieval.knowledge.dense import Encoder
from agentspec.reasoning.retrieval.knowledge.folder import open_folder
from agentspec.reasoning.retrieval.knowledge.remote import RemoteKnowledge
from agentspec.reasoning.retrieval.knowledge.settings import IndexSettings, RemoteSettings


def open_knowledge(settings: IndexSettings | RemoteSettings, name: str | None = None) -> KnowledgeBase:
    """Open a knowledge base. Blocks while it reads an index and an embedding model; sends no request to a service.

    Errors of a service call it `name`; without a name, by its address.
    Raises `KnowledgeBaseError` for a folder that cannot be used, `ConfigurationError` for settings that cannot work,
    `ModelUnavailableError` if the embedding model cannot be loaded.
    """
    if isinstance(settings, IndexSettings):
        path = settings.path.expanduser()
        return open_folder(path, load_encoder, model=settings.model, threads=settings.threads)
    return RemoteKnowledge(settings, name=name)


def load_encoder(model: str) -> Encoder:
    """Load the embedding model of a built-in name, a folder or a model-hub id. Raises `ModelUnavailableError`."""
    from agentspec.backends.torch.embeddings import SentenceEncoder

    return SentenceEncoder.load(model)
