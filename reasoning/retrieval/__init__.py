"""Speculative retrieval: RaLMSpec and KNN-LM, exact (docs/retrieval.md)."""
