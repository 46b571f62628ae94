from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch import TorchBackend
from agentspec.backends.torch.drafters.base import make_draft
from agentspec.benchmarks.best_of_n.replay import (
    AnswerRecorder,
    Contender,
    SampledAnswer,
    SampledQuestion,
    TopTokens,
    replay,
)
from agentspec.benchmarks.runs import ask
from agentspec.types import Draft, SamplingParams


def rows(*likeliest: list[int]) -> TopTokens:
    """Rows whose first token has half of the probability, the second a quarter, and so on."""
    ids = np.array(likeliest, dtype=np.int32)
    return TopTokens(ids, np.broadcast_to(np.log(0.5 ** np.arange(1, ids.shape[1] + 1)), ids.shape).astype(np.float32))


def question(*texts: list[int], prompt: tuple[int, ...] = (1, 2)) -> SampledQuestion:
    """Answers whose every token was the likeliest but one."""
    answers = [
        SampledAnswer(np.array(text, dtype=np.int32), rows(*([99, token, 98] for token in text))) for text in texts
    ]
    return SampledQuestion(np.array(prompt, dtype=np.int32), answers, 1.0, 0, rows(*([50, 51, 52] for _ in prompt)))


class Oracle(Contender):
    """Drafts what was recorded."""

    def open(self, question: SampledQuestion) -> None:
        self.question, self.at = question, [0] * len(question.answers)
        self.order: list[int] = []

    def draft(self, choice: int, budget: int) -> Draft:
        self.order.append(choice)
        ahead = self.question.answers[choice].tokens[self.at[choice] :][:budget].tolist()
        return make_draft(ahead, range(-1, len(ahead) - 1), [0.9] * len(ahead), [0] * len(ahead), [0] * len(ahead))

    def commit(self, choice: int, start: int, end: int) -> None:
        assert start == self.at[choice]
        self.at[choice] = end

    def close(self, choice: int) -> None:
        assert self.at[choice] == len(self.question.answers[choice].tokens)


def test_replay_counts_every_token_once_and_a_perfect_drafter_saves_all_it_may():
    outcome = replay([question(list(range(12)), list(range(6)))], Oracle(), 3)
    assert outcome.questions[0].tokens == 18
    assert outcome.questions[0].nodes == [3, 3, 3, 2, 3]
    assert outcome.tokens_per_step == 18 / 5
    assert outcome.nodes_per_step == 14 / 5


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
