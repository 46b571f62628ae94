"""`CallLog` writes every chat model call to a file that `agentspec cache import` and `replay` read."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGeneration, LLMResult

from agentspec.errors import ConfigurationError
from agentspec.langchain.labels import labels_of_call
from agentspec.langchain.messages import to_openai


class CallLog(BaseCallbackHandler):
    """Appends each finished call of the chat models that have it among their `callbacks` to `path`, as a line of JSON.

    A line is of the format `log`: labels, request and answer. It holds prompts in full, so the file is made readable by
    its owner only. A lone surrogate becomes a question mark, and calls that fail are left out. Thread-safe. Raises
    `ConfigurationError` where no file can be written.
    """

    run_inline = True  # in the caller's context, which has the labels

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not os.access(self.path if self.path.exists() else self.path.parent, os.W_OK) or self.path.is_dir():
            raise ConfigurationError(f"{self.path} cannot be written: name a file in a folder that exists and is yours")
        self._lock = threading.Lock()
        self._begun: dict[UUID, dict[str, Any]] = {}

    def on_chat_model_start(
        self,
        serialized: dict[str, Any],
        messages: list[list[BaseMessage]],
        *,
        run_id: UUID,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        labels, options = labels_of_call(None, metadata), kwargs.get("invocation_params") or {}
        request: dict[str, Any] = {"model": (metadata or {}).get("ls_model_name"), "messages": to_openai(messages[0])}
        if tools := options.get("tools"):
            request["tools"] = tools
        with self._lock:
            self._begun[run_id] = {
                "session": labels.session or str(run_id),
                "workflow": labels.workflow,
                "step": labels.step,
                "request": request,
            }

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        with self._lock:
            if (line := self._begun.pop(run_id, None)) is None:
                return
            answers = [one for one in response.generations[0] if isinstance(one, ChatGeneration)]
            line["response"] = {"choices": [_choice(number, answer) for number, answer in enumerate(answers)]}
            text = json.dumps({name: value for name, value in line.items() if value is not None}, ensure_ascii=False)
            if not self.path.exists():
                self.path.touch(0o600)
            with self.path.open("a", encoding="utf-8", errors="replace") as file:
                file.write(text + "\n")

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        with self._lock:
            self._begun.pop(run_id, None)


def _choice(number: int, answer: ChatGeneration) -> dict[str, Any]:
    (message,) = to_openai([answer.message])
    reason = answer.message.response_metadata.get("finish_reason") or "stop"
    return {"index": number, "message": message, "finish_reason": reason}
