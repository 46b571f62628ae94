"""Takes secrets out of recorded calls before anything is made of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agentspec.errors import InvalidRequestError
from agentspec.recordings.calls import RecordedCall
from agentspec.types import Labels

REDACTED = "[REDACTED]"

# Keys by the marks that their issuers give them, and what is assigned to a name that says it is secret. The text may be
# JSON inside JSON, so quotes may be escaped, and a key that a limit cut off has no end. No pattern begins again at each
# place of a long run of letters and digits, and no part of a name repeats without bound: the time would be its square.
SECRETS = (
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    r"\b(?:sk|pk|rk)[-_][A-Za-z0-9_-]{16,}",
    r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_[A-Za-z0-9]{20,}|npm_[A-Za-z0-9]{20,})",
    r"\b(?:xox[abeoprs]|xapp)-[A-Za-z0-9-]{10,}",
    r"\b(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}\b",
    r"\bAIza[\w-]{30,}",
    r"\bya29\.[\w-]{20,}",
    r"\bSG\.[\w-]{16,}\.[\w-]{16,}",
    r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*",
    r"(?i)(?<=bearer )[\w.~+/-]{12,}=*",
    r"(?<=://)[^\s/:@\"'\\]+:[^\s/@\"'\\]+(?=@)",
    r"(?i)(?<![a-z])(?:api[_-]?key|access[_-]?key|secret(?:[_-]?key)?|auth[_-]?token|token|passwd|"
    r"password|credentials?)(?:[_-][a-z0-9]+){0,16}\\*[\"']?\s*(?:[:=]|=>)\s*\\*[\"'](?P<quoted>[^\s\"'\\]{8,})",
    r"\b(?:[A-Z0-9]+_){0,16}(?:KEY|SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIALS?)(?:_[A-Z0-9]+){0,16}=(?P<plain>[^\s\"'\\$;&|<>(){}]{8,})",
)


class Redaction:
    """Replaces what matches one of the patterns; of a match with a named group, only the group."""

    def __init__(self) -> None:
        self._patterns = [re.compile(pattern) for pattern in SECRETS]
        self._before: dict[str, str] = {}  # texts of the call before: the next one of a conversation repeats them
        self._now: dict[str, str] = {}

    def call(self, call: RecordedCall) -> RecordedCall:
        """The call with every text in its messages, its answer and its labels redacted.

        Raises `InvalidRequestError` for one that is nested too deeply to be gone through.
        """
        self._before, self._now = self._now, {}
        labels = call.labels
        named = (name and self.text(name) for name in (labels.session, labels.workflow, labels.step))
        try:
            messages, answer = [self._value(message) for message in call.messages], self._value(call.answer)
        except RecursionError:
            raise InvalidRequestError("messages is nested too deeply to look for secrets in it") from None
        return replace(
            call, labels=Labels(*named), messages=messages, answer=answer, prompt=call.prompt and self.text(call.prompt)
        )

    def text(self, text: str) -> str:
        for pattern in self._patterns:
            text = pattern.sub(_redacted, text)
        return text

    def _value(self, value: Any) -> Any:
        if isinstance(value, str):
            if value not in self._now:
                self._now[value] = self._before[value] if value in self._before else self.text(value)
            return self._now[value]
        if isinstance(value, Mapping):
            return {self._value(key): self._value(one) for key, one in value.items()}
        return [self._value(one) for one in value] if isinstance(value, list) else value


def _redacted(match: re.Match[str]) -> str:
    if match.lastgroup is None:
        return REDACTED
    start, end = (at - match.start() for at in match.span(match.lastgroup))
    return match[0][:start] + REDACTED + match[0][end:]
