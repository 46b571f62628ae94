"""The local engine's drafters; `DrafterFactory` of `cheap.py` opens the configured ones for each answer."""
