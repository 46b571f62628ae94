"""From a `[knowledge.NAME]` table to a knowledge base."""

from __future__ import annotations

from agentspec.reasoning.retrieval.knowledge.base import KnowledgeBase
from agentspec.reasoning.retrieval.knowledge.dense import DenseMetric, Encoder
from agentspec.reasoning.retrieval.knowledge.folder import open_folder
from agentspec.reasoning.retrieval.knowledge.remote import RemoteKnowledge
from agentspec.reasoning.retrieval.knowledge.settings import IndexSettings, RemoteSettings


def open_knowledge(settings: IndexSettings | RemoteSettings) -> KnowledgeBase:
    """Open a knowledge base: blocks while an index and its embedding model are read; a service is not asked yet.

    Raises `KnowledgeBaseError` for a folder that cannot be used, `ConfigurationError` for settings that cannot work,
    `ModelUnavailableError` where the embedding model cannot be had.
    """
    if isinstance(settings, IndexSettings):
        path = settings.path.expanduser()
        return open_folder(path, load_encoder, model=settings.model, threads=settings.threads)
    metric = None if settings.model is None else DenseMetric(load_encoder(settings.model))
    return RemoteKnowledge(settings, metric)


def load_encoder(model: str) -> Encoder:
    """The embedding model that a built-in name, a folder or a model-hub id leads to. Raises `ModelUnavailableError`."""
    from agentspec.backends.torch.embeddings import SentenceEncoder

    return SentenceEncoder.load(model)
