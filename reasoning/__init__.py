"""Speculation above the token: strategies that delegate steps of thinking (docs/reasoning.md)."""
