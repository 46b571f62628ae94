"""Finds the files of a model given by a built-in name, local folder, GGUF file or model-hub id, in one folder layout.

Weights are safetensors or GGUF only: other formats run code when they are read. Code that ships with a model is
never run. Importing this package is light; the code that fetches and converts is imported at first use.
"""

from agentspec.backends.model_store.builtin import BUILTIN, Builtin
from agentspec.backends.model_store.resolve import ModelFiles, locate, require_known, resolve
from agentspec.backends.model_store.store import store_folder

__all__ = ["BUILTIN", "Builtin", "ModelFiles", "locate", "require_known", "resolve", "store_folder"]
