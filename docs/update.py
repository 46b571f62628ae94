"""Writes what the docs repeat from the code: the settings tables of configuration.md, the module list of structure.md.

`--check` only compares.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo

from agentspec.backends.settings import OpenAISettings, TorchSettings
from agentspec.cache.settings import CacheSettings
from agentspec.reasoning.settings import TraceSettings
from agentspec.reasoning.retrieval.knowledge.settings import IndexSettings, RemoteSettings
from agentspec.reasoning.settings import (
    KnnLmSettings,
    LookaheadSettings,
    RaLMSpecSettings,
    SpecReasonSettings,
    SpeculativeThinkingSettings,
)
from agentspec.settings.api_keys import ApiKey
from agentspec.settings.load import ModelSettings, ServerSettings

DOCS = Path(__file__).parent
FOLDERS = ("agentspec", "backends", "cache", "reasoning", "benchmarks")
TABLES: tuple[tuple[str, type[BaseModel]], ...] = (
    ("[server]", ServerSettings),
    ("[[server.api_keys]]", ApiKey),
    ("[cache]", CacheSettings),
    ('[backends.NAME] with kind = "torch"', TorchSettings),
    ('[backends.NAME] with kind = "openai"', OpenAISettings),
    ("[models.NAME]", ModelSettings),
    ('[models.NAME] with strategy = "specreason"', SpecReasonSettings),
    ('[models.NAME] with strategy = "speculative_thinking"', SpeculativeThinkingSettings),
    ('[models.NAME] with strategy = "lookahead"', LookaheadSettings),
    ('[knowledge.NAME] with kind = "index"', IndexSettings),
    ('[knowledge.NAME] with kind = "remote"', RemoteSettings),
    ('[models.NAME] with strategy = "ralmspec"', RaLMSpecSettings),
    ('[models.NAME] with strategy = "knnlm"', KnnLmSettings),
    ("[traces]", TraceSettings),
)


def tables() -> str:
    """Every settings class as one Markdown table."""
    return "\n\n".join("\n".join(_table(title, model)) for title, model in TABLES)


def _table(title: str, model: type[BaseModel]) -> Iterator[str]:
    yield f"### `{title}`\n\n| key | default | meaning |\n|---|---|---|"
    for name, field in model.model_fields.items():
        if name not in ("kind", "strategy"):
            yield f"| `{name}` | {_default(field)} | {field.description} |"


def _default(field: FieldInfo) -> str:
    value: Any = field.get_default(call_default_factory=True)
    if field.is_required():
        return "required"
    if value is None:
        return "unset"
    if isinstance(value, ByteSize):
        return f"`{value.human_readable(separator='')}`"
    return f"`{str(value).lower() if isinstance(value, bool) else list(value) if isinstance(value, tuple) else value}`"


def modules() -> str:
    """Every module with the first line of its docstring."""
    return "\n".join(_module_lines(DOCS.parent))


def _module_lines(root: Path) -> Iterator[str]:
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            linked = any(parent.is_symlink() for parent in path.relative_to(root).parents if parent.name)
            summary = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
            if summary and not linked:
                yield f"- `{path.relative_to(root)}`: {summary}"


PAGES: tuple[tuple[str, str, Callable[[], str]], ...] = (
    ("configuration.md", "settings", tables),
    ("structure.md", "modules", modules),
)


def main() -> None:
    for name, mark, write in PAGES:
        _update(DOCS / name, mark, write())


def _update(page: Path, mark: str, body: str) -> None:
    begin, end = f"<!-- {mark}: begin (make docs writes this) -->", f"<!-- {mark}: end -->"
    text = page.read_text()
    before, rest = text.split(begin)
    current = f"{before}{begin}\n\n{body}\n\n{end}{rest.split(end)[1]}"
    if text != current and "--check" in sys.argv:
        sys.exit(f"{page.name} is out of date; run: make docs")
    page.write_text(current)


if __name__ == "__main__":
    main()
