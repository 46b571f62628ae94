"""The local engine's drafters; `Sequence` opens those of each answer."""
