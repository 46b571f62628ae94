"""What policies read of a call: its session, and hashes of its prompt's blocks, by which they recognise prefixes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from agentspec.placement import Call

BLOCK_BYTES = 1024  # about 256 tokens, sixteen of vLLM's blocks
MAX_BLOCKS = 512
MAX_BYTES = MAX_BLOCKS * BLOCK_BYTES
_TEXT_MESSAGE = {"role", "content"}
ITEMS = 256  # of a list of token ids that are encoded at once
MOST_PIECES = 4096  # of a prompt that are looked at: more than it may have messages


def block_hashes(scope: str, pieces: Iterable[bytes]) -> Iterator[int]:
    """The hash of each whole block of the text in `pieces`, at most `MAX_BLOCKS`; later pieces are not asked for."""
    last, rest, count = hash(scope), b"", 0
    for piece in pieces:
        text = rest + piece if rest else piece
        for start in range(0, len(text) - BLOCK_BYTES + 1, BLOCK_BYTES):
            last = hash((last, text[start : start + BLOCK_BYTES]))
            yield last
            count += 1
            if count == MAX_BLOCKS:
                return
        rest = text[len(text) - len(text) % BLOCK_BYTES :]


def prompt_blocks(tenant: str, fields: Mapping[str, Any]) -> tuple[int, ...]:
    """The hashes of the blocks of the prompt in a body with these `fields`, each of all text up to its end; an
    unfinished block has none. Tenants' prompts share nothing, and hashes hold for this process.
    """
    return tuple(block_hashes(tenant, prompt_pieces(fields)))


def scoped_call(tenant: str, session: str | None, blocks: Sequence[int] = ()) -> Call:
    """What policies know of a tenant's call of a `session`."""
    return Call(session and f"{tenant}\n{session}", blocks)


def prompt_pieces(fields: Mapping[str, Any]) -> Iterable[bytes]:
    """The prompt in a body with these `fields`, piece by piece, as text in which equal beginnings are equal.

    What lies beyond `MOST_PIECES` is left out, so that no body takes long to read.
    """
    return islice(_pieces(fields), MOST_PIECES)


def _pieces(fields: Mapping[str, Any]) -> Iterator[bytes]:
    yield _encoded(fields.get("tools"))
    for name in ("system", "instructions", "prompt", "input", "messages"):
        value = fields.get(name)
        if isinstance(value, list):
            yield from chain.from_iterable(
                _items(value[start : start + ITEMS]) for start in range(0, len(value), ITEMS)
            )
        elif value is not None:
            yield _encoded(value)


def _items(items: list[Any]) -> Iterator[bytes]:
    """Some items of a list: messages and prompts each by itself, token ids all at once, since they are many and small.

    A longer list begins as a shorter one does: each item ends with its comma, and no bracket ends the list.
    """
    if isinstance(items[0], (dict, list)):
        yield from map(_encoded, items)
    else:
        yield _encoded(items)[1:-1] + b","


def _encoded(value: Any) -> bytes:
    """As JSON, which is no need for a message that is only text; of a long text, its beginning."""
    if isinstance(value, str):
        value = value[:MAX_BYTES]
    elif isinstance(value, dict) and value.keys() == _TEXT_MESSAGE and isinstance(text := value["content"], str):
        return f"{value['role']}\0{text[:MAX_BYTES]}\0".encode("utf-8", "replace")
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
