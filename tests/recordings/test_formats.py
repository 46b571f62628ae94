from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.errors import ConfigurationError
from agentspec.recordings.calls import BadLineError, RecordedCall, lines
from agentspec.recordings.formats import Format, detect, files_of, read
from agentspec.types import Labels

USER = {"role": "user", "content": "one"}
SAID = {"role": "assistant", "content": "two"}
COMPLETION = {"created": 1700000000, "choices": [{"message": SAID, "finish_reason": "stop"}]}


def write(folder: Path, *records: Any, name: str = "f.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(f"{record if isinstance(record, str) else json.dumps(record)}\n" for record in records))
    return path


def calls(folder: Path, *records: Any) -> list[RecordedCall]:
    path = write(folder, *records)
    return list(read(path, detect(path)))


def test_every_answer_of_a_conversation(tmp_path: Path) -> None:
    conversation = [{"role": "system", "content": "s"}, USER, SAID, USER, {"role": "assistant", "content": "three"}]
    first, second = calls(tmp_path, {"messages": conversation})
    assert (first.messages, first.answer, first.place) == (conversation[:2], SAID, f"{tmp_path / 'f.jsonl'}:1")
    assert (second.messages, second.answer) == (conversation[:4], conversation[4])
    assert first.labels == second.labels == Labels("f.jsonl:1")
    [named] = calls(tmp_path, {"messages": [USER, SAID], "session": "s", "step": "plan", "workflow": "w"})
    assert named.labels == Labels("s", "w", "plan")


@pytest.mark.parametrize(
    "record",
    [
        {"request": {"messages": [USER]}, "response": COMPLETION},
        {"custom_id": "c", "body": {"messages": [USER]}, "response": {"status_code": 200, "body": COMPLETION}},
        {"request": {"method": "POST", "body": {"messages": [USER]}}, "response": {"body": COMPLETION}},
        {"messages": [USER], "response": COMPLETION},
        {"messages": [USER], "response": "two"},
        {"messages": [USER], **COMPLETION},
        {"id": "r", "custom_id": "c", "response": {"status_code": 200, "body": COMPLETION}},
        {"messages": [USER], "response": {**COMPLETION, "choices": [{"message": {"content": "two"}}]}},
    ],
)
def test_a_logged_call(tmp_path: Path, record: dict[str, Any]) -> None:
    [call] = calls(tmp_path, record)
    asked = [] if "id" in record else [USER]  # the output of a batch has answers alone
    assert (call.messages, call.answer, call.finished, call.prompt) == (asked, SAID, True, None)
    assert call.created_at == (None if record.get("response") == "two" else 1700000000)
    assert call.labels.session == record.get("custom_id", "f.jsonl:1")


def test_several_choices_a_cut_answer_and_a_plain_prompt(tmp_path: Path) -> None:
    choices = [{"text": "a", "finish_reason": "length"}, {"text": "b", "finish_reason": "stop"}]
    request = {"prompt": "p", "metadata": {"session": "s", "step": "x"}}
    first, second = calls(tmp_path, {"request": request, "response": {"choices": choices}})
    assert (first.prompt, first.answer["content"], first.finished) == ("p", "a", False)
    assert (second.answer["content"], second.finished, second.labels) == ("b", True, Labels("s", None, "x"))


def test_a_trace_grows_by_session_even_where_sessions_take_turns(tmp_path: Path) -> None:
    def trace(session: str, text: str, **more: Any) -> dict[str, Any]:
        return {"session": session, "step": 0, "messages_delta": [USER], "response": text, **more}

    found = calls(tmp_path, trace("a", "x"), trace("b", "y"), trace("a", "z"), trace("a", "w", reset=True))
    assert [len(call.messages) for call in found] == [1, 1, 3, 1]
    assert found[2].messages == [USER, {"role": "assistant", "content": "x"}, USER]
    assert found[2].labels == Labels("a", None, "0")


BAD = ["no json", "[]", "{}", '{"messages": 1}', '{"messages": [1]}', '{"messages": [{"role": 1}]}', json.dumps(
    {"messages": [USER]}
)]  # fmt: skip


@pytest.mark.parametrize("line", BAD)
def test_a_bad_line_is_named_or_left_out(tmp_path: Path, line: str) -> None:
    path = write(tmp_path, {"messages": [USER, SAID]}, "", line, {"messages": [USER, SAID]})
    with pytest.raises(BadLineError) as caught:
        list(read(path, Format.chat))
    assert caught.value.place == f"{path}:3" and str(caught.value).startswith(f"{path}:3: ")
    bad: list[BadLineError] = []
    assert [call.place for call in read(path, Format.chat, bad.append)] == [f"{path}:1", f"{path}:4"]
    assert [error.place for error in bad] == [f"{path}:3"]


@pytest.mark.parametrize("time", [10**400, float("inf"), float("nan")])
@pytest.mark.parametrize("answer", [COMPLETION, {"output": [SAID]}])
def test_an_invalid_time_makes_only_its_line_bad(tmp_path: Path, answer: dict[str, Any], time: float) -> None:
    good = {"request": {"messages": [USER]}, "response": answer}
    path = write(tmp_path, good, {**good, "response": {**answer, "created": time, "created_at": time}}, good)
    bad: list[BadLineError] = []
    assert [call.place for call in read(path, Format.log, bad.append)] == [f"{path}:1", f"{path}:3"]
    assert [error.place for error in bad] == [f"{path}:2"]


@pytest.mark.parametrize(
    "answer", [None, 5, "two", {"content": {"text": "two"}}, {"content": None, "tool_calls": True}, {"tool_calls": [1]}]
)
def test_an_answer_of_another_shape_is_a_bad_line(tmp_path: Path, answer: Any) -> None:
    record = {"request": {"messages": [USER]}, "response": {"choices": [{"message": answer}]}}
    with pytest.raises(BadLineError, match=r"f\.jsonl:1: not a line of format log"):
        calls(tmp_path, record)
    with pytest.raises(BadLineError, match=r"f\.jsonl:1: not a line of format chat"):
        calls(tmp_path, {"messages": [answer if not isinstance(answer, dict) else SAID | answer, SAID]})


@pytest.mark.parametrize("response", [{}, {"choices": []}, {"error": {"message": "no"}}, {"status_code": 500}])
def test_a_call_without_an_answer_is_a_bad_line(tmp_path: Path, response: Any) -> None:
    with pytest.raises(BadLineError, match="no answer"):
        calls(tmp_path, {"request": {"messages": [USER]}, "response": response})


@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(
    st.sampled_from(["messages", "role", "content", "response", "body", "choices", "session", "messages_delta"]), inner
)), st.sampled_from([Format.trace, Format.log, Format.chat]))  # fmt: skip
def test_any_json_is_read_or_bad(tmp_path_factory: pytest.TempPathFactory, value: Any, format_: Format) -> None:
    path = write(tmp_path_factory.mktemp("any"), json.dumps(value))
    bad: list[BadLineError] = []
    assert len(list(read(path, format_, bad.append))) + len(bad) >= 1


@pytest.mark.parametrize(
    "head", ["", "hello", "{}", "[1]", "\udcff".encode("utf-8", "surrogateescape").decode("latin-1")]
)
def test_an_unknown_file_is_refused(tmp_path: Path, head: str) -> None:
    with pytest.raises(ConfigurationError, match="--format"):
        detect(write(tmp_path, head))


def test_compressed_files_and_files_that_cannot_be_read(tmp_path: Path) -> None:
    packed = tmp_path / "any.name"
    packed.write_bytes(gzip.compress(b'{"messages": []}\n\n{"b": 1}\n'))
    assert [(place[-1], line) for place, line in lines(packed)] == [("1", b'{"messages": []}\n'), ("3", b'{"b": 1}\n')]
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(ConfigurationError, match="to its end"):
        list(lines(packed))
    with pytest.raises(ConfigurationError, match="No such file"):
        detect(tmp_path / "absent")


def test_a_damaged_file_of_a_folder_is_left_out(tmp_path: Path) -> None:
    damaged = tmp_path / "run.traj"
    packed = bytearray(gzip.compress(json.dumps([{"number": number} for number in range(999)]).encode()))
    packed[20:60] = bytes(40)
    damaged.write_bytes(packed)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        detect(damaged)
    unknown: list[Path] = []
    sound = write(tmp_path, {"messages": [USER, SAID]})
    assert list(files_of(tmp_path, unknown.append)) == [sound] and unknown == [damaged]
