from __future__ import annotations

import re

from agentspec.backends.model_store import BUILTIN
from agentspec.backends.settings import TorchSettings


def test_every_artefact_is_pinned():
    for name, model in BUILTIN.items():
        assert model.name == name
        assert re.fullmatch(r"[0-9a-f]{64}", model.sha256)
        assert model.size > 0
        assert model.parts
        assert all(part.version for part in model.parts)


def test_the_default_model_is_built_in():
    assert TorchSettings().model in BUILTIN
