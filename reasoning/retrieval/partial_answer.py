"""An unfinished answer as an immutable value: its tokens, their text, and why it has ended, if it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from agentspec.text import CONTEXT_TOKENS, REPLACEMENT, StopScanner, added_text
from agentspec.types import FinishReason, TokenLogprob


class Detokenizes(Protocol):
    async def detokenize(self, token_ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class RoundOutput:
    """The tokens that one round generated, with the backend's text and finish reason."""

    token_ids: tuple[int, ...]
    text: str
    finish: FinishReason
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class PartialAnswer:
    """An answer that grows round by round; the same rounds always give the same text.

    `text` holds whole characters and ends before the first stop string. The next tokens are decoded together with the
    last tokens, `window`, whose text so far is `known`.
    """

    window: tuple[int, ...] = ()
    known: str = ""
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    stop_reason: str | None = None

    @classmethod
    async def behind(cls, prompt: Sequence[int], tokenization: Detokenizes) -> PartialAnswer:
        """An empty answer to a prompt that ends in `prompt`."""
        window = tuple(prompt[-CONTEXT_TOKENS:])
        return cls(window, await tokenization.detokenize(window) if window else "")

    @property
    def over(self) -> bool:
        return self.finish is not None

    def certain(self, stops: Sequence[str]) -> str:
        """The text that cannot become part of a stop string any more."""
        return self.text if self.over else StopScanner(tuple(stops)).feed(self.text)

    async def extended(
        self, output: RoundOutput, tokenization: Detokenizes, limit: int, stops: Sequence[str] = ()
    ) -> PartialAnswer:
        """The answer with one more round, up to `limit` tokens in all. A token that ends the answer adds no text."""
        grown = replace(self, token_ids=self.token_ids + output.token_ids, logprobs=self.logprobs + output.logprobs)
        spelled = await grown.spelled(output.token_ids, tokenization)
        scanner = StopScanner(tuple(stops))
        certain = scanner.feed(spelled.text)
        if scanner.stopped:
            return replace(spelled, text=certain, finish="stop", stop_reason=scanner.matched)
        if output.finish not in ("stop", "length"):
            return replace(await spelled.flushed(tokenization), finish=output.finish)
        if output.finish == "stop" or not output.token_ids:
            shorter = await (await grown.spelled(output.token_ids[:-1], tokenization)).flushed(tokenization)
            silent = shorter.text == self.text + output.text or await _ends_silently(output, tokenization)
            return replace(shorter if silent else await spelled.flushed(tokenization), finish=output.finish)
        if len(grown.token_ids) >= limit:
            return replace(await spelled.flushed(tokenization), finish="length")
        return spelled

    async def spelled(self, token_ids: tuple[int, ...], tokenization: Detokenizes) -> PartialAnswer:
        """The answer with the text of `token_ids`; bytes of an incomplete character wait for the next round."""
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

    async def flushed(self, tokenization: Detokenizes) -> PartialAnswer:
        """The answer with the bytes that were held back, even if they form no whole character."""
        whole = await tokenization.detokenize(self.window) if self.window else ""
        return replace(self, known=whole, text=self.text + added_text(whole, self.known))


async def _ends_silently(output: RoundOutput, tokenization: Detokenizes) -> bool:
    """Whether the last token ended the answer and is not part of its text, by the end of the text alone."""
    if not output.token_ids:
        return False
    last = await tokenization.detokenize(output.token_ids[-1:])
    return not output.text.endswith(last) if last else True
