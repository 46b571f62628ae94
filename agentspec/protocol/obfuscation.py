"""Fills the events of a stream up to equal sizes, by OpenAI's `obfuscation` field (`stream_options`)."""

from __future__ import annotations

import base64
import os
from typing import Any

from agentspec.protocol.responses import encode

BLOCK = 512
"""The JSON of an event is filled up to a multiple of this many bytes."""
_FIELD = b',"obfuscation":"'


def obfuscated(chunk: dict[str, Any]) -> bytes:
    """The JSON of `chunk` with as many random characters in `obfuscation` as fill the block."""
    plain = encode(chunk)
    return plain[:-1] + _FIELD + _random(-(len(plain) + len(_FIELD) + 1) % BLOCK) + b'"}'


def _random(size: int) -> bytes:
    """Random characters, which no compression on the way can take out again."""
    return base64.b64encode(os.urandom(size * 3 // 4 + 3), b"-_")[:size]
