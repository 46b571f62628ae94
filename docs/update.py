"""Writes the settings tables of configuration.md from the settings classes, and the goals on a GPU of results.md from
gpu.json, which a run of `make gpu` writes anew. `--check` only compares.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo

from agentspec.backends.settings import EncoderSettings, FleetSettings, OpenAISettings, TorchSettings
from agentspec.cache.settings import CacheSettings
from agentspec.reasoning.settings import STRATEGIES, DelegationSettings, IndexSettings, RemoteSettings, TraceSettings
from agentspec.settings.models import ModelSettings
from agentspec.settings.server import ApiKey, ServerSettings, TenantLimits

FOLDER = Path(__file__).parent
DELEGATING = {name: settings for name, settings in STRATEGIES.items() if issubclass(settings, DelegationSettings)}
TABLES: tuple[tuple[str, type[BaseModel]], ...] = (
    ("[server]", ServerSettings),
    ("[[server.api_keys]]", ApiKey),
    ("[server.tenants.NAME]", TenantLimits),
    ("[cache]", CacheSettings),
    ('[backends.NAME] with kind = "torch"', TorchSettings),
    ('[backends.NAME] with kind = "openai"', OpenAISettings),
    ('[backends.NAME] with kind = "encoder"', EncoderSettings),
    ("[models.NAME]", ModelSettings),
    ("[models.NAME] with a strategy that delegates thinking", DelegationSettings),
    *((f'[models.NAME] with strategy = "{name}"', settings) for name, settings in STRATEGIES.items()),
    ('[knowledge.NAME] with kind = "index"', IndexSettings),
    ('[knowledge.NAME] with kind = "remote"', RemoteSettings),
    ("[traces]", TraceSettings),
    ("[fleet]", FleetSettings),
)


def tables() -> str:
    """Every settings class as one Markdown table; what all delegating strategies share stands in one of its own."""
    return "\n\n".join("\n".join(_table(title, model)) for title, model in TABLES)


def _table(title: str, model: type[BaseModel]) -> Iterator[str]:
    yield f"### `{title}`\n\n| key | default | meaning |\n|---|---|---|"
    shared = DelegationSettings.model_fields if model in DELEGATING.values() else ()
    for name, field in model.model_fields.items():
        if name not in ("kind", "strategy", *shared):
            default = _defaults(name) if model is DelegationSettings else _default(field)
            yield f"| `{name}` | {default} | {field.description} |"


def _defaults(name: str) -> str:
    """The default of a setting of all delegating strategies, or those of each."""
    each = {strategy: _default(settings.model_fields[name]) for strategy, settings in DELEGATING.items()}
    if len(set(each.values())) == 1:
        return next(iter(each.values()))
    return ", ".join(f"{strategy}: {default}" for strategy, default in each.items())


def _default(field: FieldInfo) -> str:
    value: Any = field.get_default(call_default_factory=True)
    if field.is_required():
        return "required"
    if value is None or (isinstance(value, BaseModel) and value == type(value)()):
        return "unset"
    if isinstance(value, ByteSize):
        return f"`{value.human_readable(separator='')}`"
    text = str(value).lower() if isinstance(value, bool) else str(list(value) if isinstance(value, tuple) else value)
    return "`" + text.replace("\n", "\\n") + "`"


def gpu_table() -> str:
    """The goals on a GPU, with what was measured of each."""
    rows = json.loads((FOLDER / "gpu.json").read_text())
    head = "| requests at once | drafter | a whole call, against | goal | measured |\n|---|---|---|---|---|"
    return "\n".join([head, *map(_gpu_row, rows)])


def _gpu_row(row: dict[str, Any]) -> str:
    ratio, goal = row["ratio"], row["goal"]
    said = "not measured"
    if ratio is not None:
        low, high = row.get("interval", (ratio, ratio))
        verdict = "met" if low >= goal else "**missed**" if high < goal else "undecided"
        verdict += "" if row["equal"] else ", **answers differ**"
        said = f"{ratio:.2f}x [{low:.2f}, {high:.2f}], {row['shape']} on {row['device']}: {verdict}"
    return f"| {row['requests']} | {row['drafter']} | {row['against']} | {goal}x | {said} |"


def write(page: Path, name: str, content: str) -> None:
    """Put the content between the marks of that name. With `--check` end if that changes the page."""
    begin, end = f"<!-- {name}: begin (make docs writes this) -->", f"<!-- {name}: end -->"
    text = page.read_text()
    before, rest = text.split(begin)
    current = f"{before}{begin}\n\n{content}\n\n{end}{rest.split(end)[1]}"
    if text != current and "--check" in sys.argv:
        sys.exit(f"{page.name} is out of date; run: make docs")
    page.write_text(current)


def main() -> None:
    write(FOLDER / "configuration.md", "settings", tables())
    write(FOLDER / "results.md", "gpu", gpu_table())


if __name__ == "__main__":
    main()
