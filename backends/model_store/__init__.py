"""Where model files come from: built-in names, local folders, GGUF files and model-hub ids, all to one folder layout.

Weights are safetensors or GGUF only: other formats run code when they are read. Code that ships with a model is
never run. Importing this package is light; what fetches and converts is loaded when it is used.
"""

from agentspec.backends.model_store.builtin import BUILTIN, Builtin
from agentspec.backends.model_store.resolve import ModelFiles, fetch, locate, resolve
from agentspec.backends.model_store.store import store_folder

__all__ = ["BUILTIN", "Builtin", "ModelFiles", "fetch", "locate", "resolve", "store_folder"]
