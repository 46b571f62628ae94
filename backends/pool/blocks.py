"""Hashes of a prompt's blocks, by which policies recognise shared prefixes. Computed only when a policy looks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import overload

BLOCK_BYTES = 1024  # about 256 tokens, sixteen of vLLM's blocks
MAX_BLOCKS = 512
MAX_BYTES = MAX_BLOCKS * BLOCK_BYTES


class PromptBlocks(Sequence[int]):
    """The hashes of the blocks of a prompt's text, each of all text up to its end; an unfinished block has none.

    `pieces` returns the text as UTF-8 and is called once, when the first hash is asked for. Tenants' prompts share
    nothing: `scope` is a part of every hash. Hashes hold for this process.
    """

    def __init__(self, scope: str, pieces: Callable[[], Iterable[bytes]]) -> None:
        self._scope = scope
        self._pieces: Callable[[], Iterable[bytes]] | None = pieces
        self._hashes: tuple[int, ...] = ()

    def release(self) -> None:
        """Forget the prompt; hashes that were computed stay."""
        self._pieces = None

    def __len__(self) -> int:
        return len(self._computed())

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        return self._computed()[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._computed())

    def _computed(self) -> tuple[int, ...]:
        if self._pieces is not None:
            pieces, self._pieces = self._pieces, None
            self._hashes = tuple(block_hashes(self._scope, pieces()))
        return self._hashes


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
