from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentspec.backends.settings import TorchSettings
from agentspec.cli.trace import passages
from agentspec.langchain import ChatAgentSpec
from agentspec.reasoning.settings import SpecReasonSettings, TraceSettings
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings
from tests.thinking_model import ThinkingModel


def solve(folder: Path, problem: str = "Two plus <b>two</b>?") -> str:
    """An answer with one rejected step, traced; the trace's id."""

    def step(word: str):
        return lambda thinking: f"{word} {thinking.count(chr(10) * 2)}{' Answer: 4' if thinking else ''} <i>\n\n"

    backends = {"large": TorchSettings(model="l"), "tiny": TorchSettings(model="t")}
    settings = Settings(
        backends=backends,
        models={"fast": SpecReasonSettings(base="large", small="tiny")},
        traces=TraceSettings(path=folder),
    )
    fakes = {
        "large": ThinkingModel(step("base"), score=lambda step: "3" if "0" in step else "8"),
        "tiny": ThinkingModel(step("small")),
    }
    answer = ChatAgentSpec(model="fast", runtime=Runtime(settings, backends=fakes)).invoke(problem)
    return str(answer.response_metadata["speculation"]["trace"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "agentspec.toml").write_text(f"[traces]\npath = '{tmp_path / 'traces'}'\n")
    return tmp_path / "traces"


def test_show_prints_each_step_with_its_author_score_and_time(program, folder):
    trace = solve(folder, "Two plus <b>two</b>?\x1b[2J")
    shown = program("trace", trace)
    assert shown.exit_code == 0, shown.output
    words = shown.output
    assert words.index("small 0") < words.index("base 0") < words.index("small 1") < words.index("The answer is four.")
    assert "score 3" in words and "score 8" in words and "thinking over: answered" in words
    assert words.count("dropped") == 1 and "user: Two plus <b>two</b>?[2J" in words
    assert program("trace", "last").output == words
    records = json.loads(program("trace", trace, "--json").output)
    assert [record["event"] for record in records][-2:] == ["ended", "answer"]


def test_words_that_were_looked_at_and_drawn_again_are_shown_as_dropped():
    peek, kept = ({"author": "small", "text": text, "tokens": 2, "seconds": 0.1} for text in ("look here", "so it is"))
    records = [{"event": "proposed", "step": peek}, {"event": "accepted", "step": kept}]
    records += [{"event": "proposed", "step": kept}, {"event": "accepted", "step": kept}]
    assert [(text, style == "dim strike") for _, text, style in passages(records)] == [
        ("look here", True),
        ("so it is", False),
        ("so it is", False),
    ]


def test_without_an_id_all_are_listed(program, folder):
    first, second = solve(folder), solve(folder)
    assert set(program("trace").output.split()) == {first, second}
    (folder / f"{first}.jsonl").unlink()
    assert json.loads(program("trace", "--json").output) == [second]
    missing = program("trace", first)
    assert missing.exit_code == 1 and "no trace" in missing.output
    assert program("trace", "../agentspec").exit_code == 1


def test_without_a_folder_it_says_what_to_set(program):
    refused = program("trace")
    assert refused.exit_code == 2 and "set path in [traces]" in refused.output


def test_a_folder_that_cannot_be_made_is_a_configuration_error(program, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "agentspec.toml").write_text(f"[traces]\npath = '{tmp_path / 'file' / 'traces'}'\n")
    refused = program("trace")
    assert refused.exit_code == 2 and "traces.path" in refused.output
