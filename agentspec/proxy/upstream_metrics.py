"""What upstreams count by themselves, fetched when somebody looks at the gateway's metrics."""

from __future__ import annotations

import asyncio

from agentspec.backends.openai import OpenAIBackend
from agentspec.runtime import Runtime
from agentspec.telemetry.metrics import UpstreamSample


class UpstreamCounters:
    """`samples` are those of the last `fetch`. An upstream that did not answer then is missing from them."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.samples: list[UpstreamSample] = []

    async def fetch(self) -> None:
        """Ask all upstreams at once. Waits at most three seconds for those that do not answer, and raises nothing."""
        backends = self._runtime.backends()
        upstreams = {name: backend for name, backend in backends.items() if isinstance(backend, OpenAIBackend)}
        found = await asyncio.gather(*(_sample(name, upstream) for name, upstream in upstreams.items()))
        self.samples = [sample for sample in found if sample is not None]


async def _sample(name: str, upstream: OpenAIBackend) -> UpstreamSample | None:
    counted = await upstream.acceptance()
    if counted is None:
        return None
    return UpstreamSample(name, counted.drafts, counted.draft_tokens, counted.accepted_tokens)
