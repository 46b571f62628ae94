from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    words = ["[UNK]", "user", "assistant", "check", "the", "order", "again", "please"]
    built = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    built.pre_tokenizer = Whitespace()
    built.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    built.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def traces(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "first.jsonl.gz", tmp_path / "second.jsonl.gz"]
    for path in paths:
        with gzip.open(path, "wt") as lines:
            for number in range(3):
                delta = [{"role": "user", "content": "check the order"}]
                record = {"session": str(number), "messages_delta": delta, "response": "check the order again please"}
                lines.write(json.dumps(record) + "\n")
    return paths


def test_cache_prints_and_writes_what_it_measured(program, tokenizer, traces, tmp_path):
    out = tmp_path / "out.json"
    result = program(
        *("bench", "cache", "--data", *traces, "--tokenizer", tokenizer, "--calls", 2, "--budgets", 2, 4),
        *("--no-costs", "--json", out),
    )
    assert result.exit_code == 0, result.output
    assert "Tokens per step" in result.output
    data = json.loads(out.read_text())
    assert [file["name"] for file in data["files"]] == ["first", "second"]
    assert data["files"][0]["budgets"]["4"]["calls"]["tokens"] == [6, 6]
    assert data["costs"] is None


def test_published_logs_become_traces_that_can_be_replayed(program, tokenizer, tmp_path):
    log, out = tmp_path / "runs.json", tmp_path / "out.jsonl.gz"
    turns = [("user", "check the order"), ("assistant", "again please"), ("user", "please"), ("assistant", "again")]
    log.write_text(json.dumps([{"task_id": 0, "traj": [{"role": r, "content": c} for r, c in turns]}]))
    result = program("bench", "traces", "tau-bench", log, "--out", out)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("2 calls written to")
    result = program("bench", "cache", "--data", out, "--tokenizer", tokenizer, "--no-costs")
    assert result.exit_code == 0, result.output
    assert program("bench", "traces", "other-bench", log, "--out", out).exit_code == 2
    assert program("bench", "traces", "aider", log, "--out", out).exit_code == 2


@pytest.mark.slow
@pytest.mark.counted
def test_gpu_needs_a_tokenizer_with_traces_and_runs_without_both(program, traces, tmp_path):
    out = tmp_path / "out.json"
    assert program("bench", "gpu", "--traces", traces[0]).exit_code == 2
    result = program("bench", "gpu", "--shape", "tiny", "--device", "cpu", "--questions", 2, "--json", out)
    assert result.exit_code == 0, result.output
    assert "on CPU" in result.output and "left out: recorded answers: no traces" in result.output
    assert json.loads(out.read_text())["shape"] == "tiny"


def test_retrieval_says_that_few_questions_say_nothing(program, tmp_path):
    file = tmp_path / "one.jsonl"
    file.write_text('{"id": "1", "question": "why?", "text": "because"}\n')
    result = program("bench", "retrieval", "--corpus", file, "--questions", file, "--count", 3)
    assert result.exit_code == 2 and "fewer than 7 questions" in result.output
    result = program("bench", "retrieval", "--corpus", file, "--questions", file)
    assert result.exit_code == 2 and f"{file} holds 1 line, and at least 7 are needed" in result.output
    assert program("bench", "retrieval", "--corpus", tmp_path / "none", "--questions", file).exit_code == 2


def test_calls_of_tools_are_predicted_from_recorded_sessions(program, tmp_path):
    lines, out = [], tmp_path / "out.json"
    for number in range(12):
        call = json.dumps({"name": "get_user", "arguments": {"id": f"ann_{number}"}})
        said = [{"role": "user", "content": f"I am ann_{number}"}]
        lines.append(json.dumps({"session": str(number), "messages_delta": said, "response": call}))
    (tmp_path / "sessions.jsonl").write_text("\n".join(lines))
    result = program("bench", "tools", tmp_path / "sessions.jsonl", "--json", out)
    assert result.exit_code == 0 and "Calls predicted" in result.output, result.output
    data = json.loads(out.read_text())["files"]["sessions.jsonl"]
    assert data["top_1"] <= data["top_3"]
