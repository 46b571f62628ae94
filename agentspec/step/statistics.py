"""What each step of a workflow cost: rows that model calls and runs of a step's code are added up in."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from agentspec.protocol.speculation import StepSpeculation
from agentspec.types import Speculation, Usage

Key = tuple[str | None, str | None]

MAX_ROWS = 1024
OTHER: Key = ("(other)", "(other)")


@dataclass(frozen=True, slots=True)
class StepRow:
    """The totals of one step of one workflow.

    `runs`, `errors` (runs that raised) and `seconds` (wall clock inside the step, nested steps included) describe the
    step's own code. The other fields describe its model calls, without those of nested steps. `verified_tokens` are
    the completion tokens of calls that reported their verify steps: forwards that verified drafts. `rounds` are what a
    strategy counts instead: steps of thinking, or rounds of retrieval. `delegated_tokens` are the completion tokens
    that a small model wrote and the strategy kept, `early_tools` the tools whose result was there before their call.
    """

    workflow: str | None = None
    step: str | None = None
    runs: int = 0
    errors: int = 0
    seconds: float = 0.0
    calls: int = 0
    failed_calls: int = 0
    model_seconds: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    verified_tokens: int = 0
    verify_steps: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    delegated_tokens: int = 0
    early_tools: int = 0
    estimated_seconds_saved: float = 0.0

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens committed per verify step; None if no call reported verify steps."""
        return self.verified_tokens / self.verify_steps if self.verify_steps else None


class StepStatistics:
    """Adds up runs and calls by (workflow, step). Thread-safe; after `MAX_ROWS` keys, further keys share one row."""

    def __init__(self) -> None:
        self._rows: dict[Key, StepRow] = {}
        self._lock = threading.Lock()

    def add_call(
        self, key: Key, usage: Usage | None, speculation: Speculation | None, seconds: float, **more: float
    ) -> None:
        """Count one model call of `seconds` seconds, and `more`; `usage` and `speculation` are None if unknown."""
        prompt, tokens = (0, 0) if usage is None else (usage.prompt_tokens, usage.completion_tokens)
        counts = more if speculation is None else more | _counted(speculation, tokens)
        self.add(key, calls=1, model_seconds=seconds, prompt_tokens=prompt, completion_tokens=tokens, **counts)

    def rows(self) -> list[StepRow]:
        """The current rows, in the order in which the steps were first seen."""
        with self._lock:
            return list(self._rows.values())

    def reset(self) -> None:
        """Delete all counts."""
        with self._lock:
            self._rows.clear()

    def add(self, key: Key, **more: float) -> None:
        """Add to fields of a row."""
        with self._lock:
            if key not in self._rows and len(self._rows) >= MAX_ROWS:
                key = OTHER
            row = self._rows.get(key, StepRow(*key))
            self._rows[key] = replace(row, **{name: getattr(row, name) + value for name, value in more.items()})


def _counted(done: Speculation, tokens: int) -> dict[str, float]:
    """What speculation did for a call that wrote so many tokens, by fields of a row."""
    return {
        "verified_tokens": tokens if done.forwards else 0,
        "verify_steps": done.forwards,
        "rounds": done.steps - done.forwards,
        "drafted": done.drafted,
        "accepted": done.accepted,
        "delegated_tokens": done.kept_tokens.get("small", 0) if isinstance(done, StepSpeculation) else 0,
        "estimated_seconds_saved": done.estimated_seconds_saved,
    }
