"""The former path and name of `agentspec.reasoning.retrieval.knn.KnnSettings`."""

from agentspec.reasoning.retrieval.knn.settings import KnnSettings as KnnKnobs
from agentspec.reasoning.retrieval.knn.settings import KnnSettings as KnnSettings

__all__ = ["KnnKnobs", "KnnSettings"]
