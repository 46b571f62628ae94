"""An answer in the making as a value: its tokens, the text they have become, whether it is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agentspec.backends.base import Tokenization
from agentspec.text.detokenizer import CONTEXT_TOKENS, REPLACEMENT, added_text
from agentspec.text.stop_strings import StopScanner
from agentspec.types import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class RoundOutput:
    """What one round generated. `text` is what the backend made of it, `finish` why it stopped."""

    token_ids: tuple[int, ...]
    text: str
    finish: FinishReason
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class PartialAnswer:
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
    async def behind(cls, prompt: Sequence[int], tokenization: Tokenization) -> PartialAnswer:
        """An answer that is still empty, to a prompt that ends in `prompt`."""
        window = tuple(prompt[-CONTEXT_TOKENS:])
        return cls(window, await tokenization.detokenize(window) if window else "")

    @property
    def over(self) -> bool:
        return self.finish is not None

    def certain(self, stops: Sequence[str]) -> str:
        """The text that no stop string can take back any more."""
        return self.text if self.over else StopScanner(tuple(stops)).feed(self.text)

    async def extended(
        self, output: RoundOutput, tokenization: Tokenization, limit: int, stops: Sequence[str] = ()
    ) -> PartialAnswer:
        """With one more round, up to `limit` tokens in all; what ends the answer adds no text of its own."""
        grown = replace(self, token_ids=self.token_ids + output.token_ids, logprobs=self.logprobs + output.logprobs)
        spelled = await grown._spelled(output.token_ids, tokenization)
        scanner = StopScanner(tuple(stops))
        certain = scanner.feed(spelled.text)
        if scanner.stopped:
            return replace(spelled, text=certain, finish="stop")
        if output.finish not in ("stop", "length"):
            return replace(await spelled._flushed(tokenization), finish=output.finish)
        if output.finish == "stop" or not output.token_ids:
            if await _ends_silently(output, tokenization):
                spelled = await grown._spelled(output.token_ids[:-1], tokenization)
            return replace(await spelled._flushed(tokenization), finish=output.finish)
        if len(grown.token_ids) >= limit:
            return replace(await spelled._flushed(tokenization), finish="length")
        return spelled

    async def _spelled(self, token_ids: tuple[int, ...], tokenization: Tokenization) -> PartialAnswer:
        """With the text of `token_ids`; bytes that form no character yet are left for the next round."""
        if not token_ids:
            return self
        window = self.window + token_ids
        whole = await tokenization.detokenize(window)
        added = added_text(whole, self.known)
        if whole.endswith(REPLACEMENT):
            complete = whole.rstrip(REPLACEMENT)
            return replace(self, window=window, known=complete, text=self.text + added_text(complete, self.known))
        last = window[-CONTEXT_TOKENS:]
        return replace(self, window=last, known=await tokenization.detokenize(last), text=self.text + added)

    async def _flushed(self, tokenization: Tokenization) -> PartialAnswer:
        """With what was held back, unfinished as it is."""
        whole = await tokenization.detokenize(self.window) if self.window else ""
        return replace(self, known=whole, text=self.text + added_text(whole, self.known))


async def _ends_silently(output: RoundOutput, tokenization: Tokenization) -> bool:
    """Whether the last token ended the answer and is no part of its text."""
    if not output.token_ids:
        return False
    last = await tokenization.detokenize(output.token_ids[-1:])
    return not output.text.endswith(last) if last else True
