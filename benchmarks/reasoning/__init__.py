"""Strategies that delegate thinking, on problems whose answers are known: accuracy, tokens and time."""
