"""What drafting costs a server each step, without the server: eight requests over a large cache."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from agentspec.backends.vllm.drafting import ServerDrafter, DraftTurn
from agentspec.benchmarks.synthetic_text import synthetic_tokens
from agentspec.cache import SuffixCache
from agentspec.cache.index import DEPTH

CACHED = 1_000_000
OUTPUT = 1000
PROMPT = 1000
STEPS = 400
STEP_SECONDS = 0.01
MOST = 32


@dataclass(frozen=True, slots=True)
class DraftingCost:
    """Milliseconds a step."""

    requests: int
    median_ms: float
    p99_ms: float
    drafted: float  # tokens a step


def drafting_cost(requests: int = 8, cached: int = CACHED) -> DraftingCost:
    """Requests whose text copies what was said before, in steps of a fixed time, over `cached` tokens of the past."""
    text = synthetic_tokens(cached + requests * (PROMPT + 8 * STEPS))
    with SuffixCache.open() as cache:
        for start in range(0, cached, OUTPUT):
            with cache.request(text[max(0, start - 64) : start], session="past") as request:
                request.extend(text[start : start + OUTPUT])
        drafter = ServerDrafter(lambda state, prompt: cache.request(prompt), int(text.max()) + 1)
        seconds, drafted = _steps(drafter, np.split(text[cached:], requests))
        drafter.close()
    median, p99 = np.percentile(1e3 * np.array(seconds[STEPS // 4 :]), [50, 99])
    return DraftingCost(requests, float(median), float(p99), drafted / STEPS)


def _steps(drafter: ServerDrafter, texts: list[np.ndarray]) -> tuple[list[float], int]:
    states = [drafter.begin(text[:PROMPT]) for text in texts]
    drafter.flush()
    at = [PROMPT] * len(texts)
    fresh = [text[PROMPT : PROMPT + 1] for text in texts]
    seconds, drafted = [], 0
    for _ in range(STEPS):
        ends = [text[: end + len(new)][-DEPTH:] for text, end, new in zip(texts, at, fresh, strict=True)]
        turns = [DraftTurn(*turn, MOST) for turn in zip(states, fresh, ends, strict=True)]
        started = time.perf_counter()
        chains = drafter.propose(turns)
        seconds.append(time.perf_counter() - started)
        drafted += sum(map(len, chains))
        for i, chain in enumerate(chains):
            at[i] += len(fresh[i])
            fresh[i] = _verified(chain, texts[i][at[i] :])
        time.sleep(STEP_SECONDS)
    return seconds, drafted


def _verified(chain: list[int], text: np.ndarray) -> np.ndarray:
    """The chain as far as the text has it, and the text's own next token; at most seven, so that the text lasts."""
    right = next((i for i, token in enumerate(chain) if token != text[i]), len(chain))
    return text[: min(7, right) + 1]
