"""Renders a trace as lines for a terminal, and as one self-contained HTML page."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

COLOURS = {"small": "green", "base": "blue", "answer": "default"}
Record = Mapping[str, Any]
_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])  # all but tabs and line ends


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of the answer: its author, its text, a note on it, and whether it was dropped."""

    author: str
    text: str
    note: str
    dropped: bool = False


def passages(records: Sequence[Record]) -> Iterator[Passage]:
    """The passages of a trace in order, dropped drafts included, with score and time in their notes."""
    proposed: Record | None = None
    noted = ""
    for record in records:
        match record["event"]:
            case "proposed":
                proposed = record["step"]
            case "scored":
                reason = f", {record['reason']}" if record["reason"] else ""
                noted = f"score {record['value']:.3g} in {record['seconds']:.2f} s{reason}"
            case "triggered":
                detail = f" ({record['detail']})" if record["detail"] else ""
                yield Passage("rule", "", f"rule: {record['rule']}{detail}")
            case "failed":
                yield Passage("rule", "", f"without {record['role']}: {record['reason']}")
            case "accepted" | "rewritten":
                if proposed is not None and proposed != record["step"]:
                    note = f"{_beside(proposed, noted)}, dropped"
                    yield Passage(proposed["author"], proposed["text"], note, dropped=True)
                    noted = ""
                yield Passage(record["step"]["author"], record["step"]["text"], _beside(record["step"], noted))
                proposed, noted = None, ""
            case "ended":
                yield Passage("rule", "", f"thinking over: {record['reason']}")
            case "answer":
                yield Passage("answer", record["text"], f"answer, done after {record['at']:.2f} s")


def lines(records: Sequence[Record]) -> Iterator[Text]:
    """The lines for a terminal: the heading and the request's messages, then each passage after its note."""
    yield Text(_title(records[0]), style="bold")
    for message in records[0]["messages"]:
        yield Text(_harmless(f"{message.get('role', '')}: {message.get('content', '')}"), style="italic")
    for passage in passages(records):
        yield Text(_harmless(passage.note), style="dim")
        if passage.text:
            style = "dim strike" if passage.dropped else COLOURS[passage.author]
            yield Text(_harmless(passage.text.strip("\n")), style=style)


def _harmless(text: str) -> str:
    """`text` without control characters, which could steer the terminal."""
    return text.translate(_CONTROLS)


def page(records: Sequence[Record]) -> str:
    """One HTML page. It escapes all text of models and users, and loads no other resources."""
    first = records[0]
    asked = "".join(_paragraph("asked", str(m.get("role", "")), str(m.get("content", ""))) for m in first["messages"])
    body = "".join(
        _paragraph(f"{passage.author}{' dropped' if passage.dropped else ''}", passage.note, passage.text)
        for passage in passages(records)
    )
    title = html.escape(_title(first))
    head = f"<meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
    return f"<!doctype html><html lang=en>{head}<h1>{title}</h1>{asked}{body}"


_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:50rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
h1{font-size:1rem}div{border-left:.4rem solid #999;margin:.5rem 0;padding:.2rem .8rem;white-space:pre-wrap}
.small{border-color:#2a9d4e;background:#f0faf3}.base{border-color:#2468c9;background:#f0f5fc}
.dropped{opacity:.6}.dropped span{text-decoration:line-through}.rule{border-color:#d98f00}
small{display:block;color:#666}
"""


def _paragraph(kind: str, note: str, text: str) -> str:
    inner = f"<small>{html.escape(note)}</small><span>{html.escape(text.strip(chr(10)))}</span>"
    return f'<div class="{kind}">{inner}</div>\n'


def _title(head: Record) -> str:
    knobs = ", ".join(f"{name} = {value}" for name, value in head["knobs"].items())
    return f"{head['model']}: {head['strategy']} ({knobs}), trace {head['trace']}"


def _beside(step: Record, noted: str) -> str:
    facts = f"{step['author']}, {step['tokens']} tokens in {step['seconds']:.2f} s"
    return f"{facts}, {noted}" if noted else facts
