"""Grammars that answers must follow: what they may hold, how they are compiled, and their state along an answer."""
