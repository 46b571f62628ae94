"""An answer in the making as a value: its tokens, the text they have become, whether it is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agentspec.backends.base import Tokenization
from agentspec.types import FinishReason, TokenLogprob

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 6  # decoded along, so that the first token keeps its leading space


@dataclass(frozen=True, slots=True)
class RoundOutput:
    """What one round generated. `text` is what the backend made of it, `finish` why it stopped."""

    token_ids: tuple[int, ...]
    text: str
    finish: FinishReason
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Transcript:
    """An answer as far as it goes. It grows round by round, and the same rounds always give the same text.

    `text` holds whole characters, and ends before the first stop string; `window` are the tokens that the next ones
    are decoded with, `known` is their text so far.
    """

    window: tuple[int, ...] = ()
    known: str = ""
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None

    @classmethod
    async def behind(cls, prompt: Sequence[int], side: Tokenization) -> Transcript:
        """An answer that is still empty, to a prompt that ends in `prompt`."""
        window = tuple(prompt[-CONTEXT_TOKENS:])
        return cls(window, await side.detokenize(window) if window else "")

    @property
    def over(self) -> bool:
        return self.finish is not None

    def certain(self, stops: Sequence[str]) -> str:
        """The text that no stop string can take back any more."""
        if self.over:
            return self.text
        return self.text[: len(self.text) - max((_begun(self.text, stop) for stop in stops), default=0)]

    async def extended(
        self, piece: RoundOutput, side: Tokenization, limit: int, stops: Sequence[str] = ()
    ) -> Transcript:
        """With one more round, up to `limit` tokens in all; what ends the answer adds no text of its own."""
        grown = replace(self, token_ids=self.token_ids + piece.token_ids, logprobs=self.logprobs + piece.logprobs)
        spelled = await grown._spelled(piece.token_ids, side)
        if (cut := _cut(spelled.text, stops)) is not None:
            return replace(spelled, text=cut, finish="stop")
        if piece.finish not in ("stop", "length"):
            return replace(await spelled._flushed(side), finish=piece.finish)
        if piece.finish == "stop" or not piece.token_ids:
            if await _ends_silently(piece, side):
                spelled = await grown._spelled(piece.token_ids[:-1], side)
            return replace(await spelled._flushed(side), finish=piece.finish)
        if len(grown.token_ids) >= limit:
            return replace(await spelled._flushed(side), finish="length")
        return spelled

    async def _spelled(self, token_ids: tuple[int, ...], side: Tokenization) -> Transcript:
        """With the text of `token_ids`; bytes that form no character yet are left for the next round."""
        if not token_ids:
            return self
        window = self.window + token_ids
        whole = await side.detokenize(window)
        added = _added(whole, self.known)
        if whole.endswith(REPLACEMENT):
            complete = whole.rstrip(REPLACEMENT)
            return replace(self, window=window, known=complete, text=self.text + _added(complete, self.known))
        last = window[-CONTEXT_TOKENS:]
        return replace(self, window=last, known=await side.detokenize(last), text=self.text + added)

    async def _flushed(self, side: Tokenization) -> Transcript:
        """With what was held back, unfinished as it is."""
        whole = await side.detokenize(self.window) if self.window else ""
        return replace(self, known=whole, text=self.text + _added(whole, self.known))


def _added(whole: str, known: str) -> str:
    """What `whole` says behind `known`, whose end may have been half a character."""
    known = known if whole.startswith(known) else known.rstrip(REPLACEMENT)
    return whole[len(known) :]


async def _ends_silently(piece: RoundOutput, side: Tokenization) -> bool:
    """Whether the last token ended the answer and is no part of its text."""
    if not piece.token_ids:
        return False
    last = await side.detokenize(piece.token_ids[-1:])
    return not piece.text.endswith(last) if last else True


def _cut(text: str, stops: Sequence[str]) -> str | None:
    """The text before the stop string that is complete first, of those the longest; None without one."""
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(found)[1]] if found else None


def _begun(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
