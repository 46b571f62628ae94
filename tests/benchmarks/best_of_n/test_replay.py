from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch import TorchBackend
from agentspec.benchmarks.best_of_n.replay import (
    AnswerRecorder,
)
from agentspec.benchmarks.runs import ask
from agentspec.types import SamplingParams


def test_what_is_recorded_is_what_the_engine_answers(tiny_model: Path):
    backend = TorchBackend.load(TorchSettings(model=str(tiny_model)))
    (recorded,) = AnswerRecorder(backend, 0.8, 12, lambda text: None).record(["count"], 2)
    sampling = SamplingParams(temperature=0.8, seed=0, max_tokens=12)
    loop = asyncio.new_event_loop()
    run = loop.run_until_complete(ask(backend, recorded.prompt.tolist(), sampling, "default", speculation=False))
    loop.run_until_complete(backend.aclose())
    loop.close()
    first, second = recorded.answers
    assert first.tokens.tolist() == list(run.tokens) != second.tokens.tolist()
    assert len(first.rows) == len(first.tokens) and len(recorded.prompt_rows) == len(recorded.prompt)
    assert (np.diff(first.rows.logprobs) <= 0).all()
