"""Strategies that speculate on more than tokens.

`delegation` lets a small model write steps of thinking (docs/strategies.md); `retrieval` guesses the documents or
neighbours that a search will return (docs/retrieval.md).
"""
