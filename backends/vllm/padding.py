"""Fills chains up to the full length where that lets a step run as one CUDA graph, if such steps are worth it.

vLLM captures graphs of whole steps only for steps in which every request has exactly 1 + `num_speculative_tokens`
tokens. Inside such a graph a token that is rejected costs nothing more: all are computed whatever they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from agentspec.backends.engine_plugin.settings import enabled
from agentspec.backends.vllm.step_cost import StepTimeModel

SWITCH = "VLLM_PAD"
_TRIES = 8  # padded steps of about a batch size before their time counts as known
_AGAIN = 256  # steps after which a batch size that did not pay is tried once more


class ChainPadding:
    """Learns what a step of full chains takes, and says where it gains more tokens a second than the chains as cut.

    `width` is the full length of a chain, `most_tokens` the size of the largest graph.
    """

    def __init__(self, width: int, most_tokens: int) -> None:
        self._width, self._most = width, most_tokens
        self._cost = StepTimeModel()
        self._tries: Counter[int] = Counter()  # padded steps, by batch size in powers of two
        self._waits: Counter[int] = Counter()  # steps that were not, since the last one that was

    def fits(self, limits: Sequence[int]) -> bool:
        """Whether every request may have a full chain, and there is a graph for all of them."""
        return bool(limits) and min(limits) >= self._width and len(limits) * (1 + self._width) <= self._most

    def pays(self, requests: int, gain: float, cut_gain: float, cut_seconds: float) -> bool:
        """Whether to fill the chains: they are expected to gain `gain` tokens, and `cut_gain` in `cut_seconds` as cut.

        A batch size of which little is known is tried, where that gains as many tokens.
        """
        size = requests.bit_length()
        if self._tries[size] < _TRIES or self._waits[size] >= _AGAIN:
            chosen = True
        else:
            chosen = gain / self._cost.seconds(requests * (1 + self._width)) > cut_gain / cut_seconds
        self._waits[size] = 0 if chosen else self._waits[size] + 1
        return chosen

    def holds(self, requests: int, tokens: int) -> bool:
        """Whether a step of so many tokens is one of full chains, and read no prompt of another request."""
        return tokens <= requests * (1 + self._width)

    def observe(self, requests: int, seconds: float) -> None:
        """Learn from a step of full chains."""
        self._tries[requests.bit_length()] += 1
        self._cost.observe(requests * (1 + self._width), seconds)

    def filled(self, chain: list[int], last: int) -> list[int]:
        """The chain at full length. What repeats is as likely as anything else; `last` is the token before it."""
        return chain + [chain[-1] if chain else last] * (self._width - len(chain))


def padding_for(config: Any) -> ChainPadding | None:
    """The padding for a `VllmConfig`; None where no step runs as one graph, or where the operator did not ask for it.

    Raises `ConfigurationError` if the switch is neither on nor off.
    """
    if not enabled(SWITCH, default=False) or not (most := largest_graph(config)):
        return None
    return ChainPadding(int(config.speculative_config.num_speculative_tokens), most)


def largest_graph(config: Any) -> int:
    """Tokens of the largest step that a `VllmConfig` runs as one graph; 0 where steps run piece by piece.

    To be asked once the server has settled what the model's attention allows.
    """
    compilation = getattr(config, "compilation_config", None)
    mode = getattr(compilation, "cudagraph_mode", None)
    if getattr(getattr(config, "device_config", None), "device_type", None) != "cuda":
        return 0
    if mode is None or not hasattr(mode, "decode_mode") or mode.decode_mode().name != "FULL":
        return 0
    return int(getattr(compilation, "max_cudagraph_capture_size", None) or 0)
