from __future__ import annotations

from agentspec.benchmarks.agent_workflows import (
    workflow,
)

TURNS = 8
CODE = "class A:\n    def __init__(self, n):\n        self.n = n\n\n    def get_n(self, n):\n        return self.n + n"


def test_history_and_files_are_as_if_each_step_had_been_done_rightly() -> None:
    first, second, third = workflow([CODE], 3, seed=0).turns
    assert "Add a docstring to each function" in first.asked and '"""Get n."""' not in first.asked
    assert first.answer == '```python\n    def get_n(self, n):\n        """Get n."""\n        return self.n + n\n```'
    assert (
        "without any changes" in second.asked and second.asked.endswith(second.answer) and second.answer == first.answer
    )
    new = third.asked.partition("Rename n to ")[2].split()[0]
    assert f"def get_n(self, {new}):" in third.answer and f"return self.n + {new}" in third.answer
    assert new not in third.asked.partition("Rename")[0]
