"""The former path of `agentspec.reasoning.retrieval.knn.KnnBackend`."""

from agentspec.reasoning.retrieval.knn.backend import KnnBackend as KnnBackend
