"""The token cache alone, then a local model that drafts from it.

python examples/quickstart.py
"""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser

from agentspec import GenerateRequest, Runtime, SamplingParams, SuffixCache, load_settings

MODEL = "smollm2-135m"
PROMPT = "Repeat this line exactly: def area(width: float, height: float) -> float: return width * height"


def show_the_cache() -> None:
    """What was generated once is proposed when its beginning turns up again."""
    with SuffixCache.open() as cache:  # SuffixCache.open("some/folder") would keep it on disk
        with cache.request([1, 2, 3], session="first") as request:
            request.extend([4, 5, 6, 7, 8])
        with cache.request([9, 2, 3, 4], session="second") as request:
            draft = request.draft(max_tokens=8)
            print("after 9 2 3 4 comes, by experience:", draft.tokens.tolist())
            print("with these chances to be accepted: ", [f"{chance:.2f}" for chance in draft.probabilities])


async def show_the_engine() -> None:
    """The same prompt twice: the second answer is the same, in fewer forward passes."""
    settings = load_settings(overrides={"backends": {"local": {"kind": "torch", "model": MODEL}}})
    async with Runtime(settings) as runtime:
        for attempt in ("first", "second"):
            request = GenerateRequest(
                model=MODEL,
                messages=[{"role": "user", "content": PROMPT}],
                sampling=SamplingParams(temperature=0.0, max_tokens=32),
            )
            text = ""
            async for delta in runtime.generate(request):
                text += delta.text
                if delta.usage and delta.speculation:
                    tokens, steps = delta.usage.completion_tokens, delta.speculation.steps
                    print(f"{attempt}: {tokens} tokens in {steps} verify steps")
        print(text)


if __name__ == "__main__":
    ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    show_the_cache()
    asyncio.run(show_the_engine())
