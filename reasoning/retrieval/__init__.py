"""Speculative retrieval that never changes an answer: RaLMSpec and KNN-LM (docs/retrieval.md)."""
