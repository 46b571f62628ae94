"""The local engine's drafters; `DrafterFactory` of `factory.py` opens the configured ones for each answer."""
