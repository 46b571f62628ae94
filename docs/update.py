"""Writes the settings tables of configuration.md from the settings classes, the codes of errors.md from the classes of
errors, and the goals on a GPU of results.md from gpu.json, which a run of `make gpu` writes. `--check` only compares.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo

from agentspec import errors
from agentspec.backends.settings import EncoderSettings, FleetSettings, OpenAISettings, TorchSettings
from agentspec.cache.settings import CacheSettings
from agentspec.reasoning.settings import STRATEGIES, DelegationSettings, IndexSettings, RemoteSettings
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


WHAT_TO_DO = {
    "answer_memory": "Try again; raise `server.max_body_memory` if it happens often.",
    "cache_closed": "Open the cache again, or close it later.",
    "cache_damaged": "`agentspec cache verify` says what is damaged; the rest goes on being used.",
    "cache_error": "The message says what was asked for and why it cannot be done.",
    "cache_format": "The message names the file; another `cache.path` begins an empty cache.",
    "cache_locked": "End the other process, or give this one another `cache.path`.",
    "cache_namespace": "Use the folder with the model, tokenizer and tenant that wrote it, or another `cache.path`.",
    "cache_unavailable": "Look at permissions, space and the database server that `cache.path` names.",
    "cache_version": "Use the version of agentspec that wrote it, or another `cache.path`.",
    "client_too_slow": "Send the request faster, or raise `server.request_timeout`.",
    "configuration_error": "Correct the setting that the message names; `agentspec config check` tries them all.",
    "context_length_exceeded": "Shorten the prompt, or ask for fewer `max_tokens`.",
    "engine_error": "The server's log has the cause under the request's id.",
    "engine_stopped": "The process ends by itself; let its supervisor start it again.",
    "headers_too_large": "Send fewer or shorter headers, or a shorter target.",
    "host_not_allowed": "Add the name to `server.allowed_hosts`, or set `server.api_keys`.",
    "internal_error": "A defect of agentspec: report it with what the server's log has under the request's id.",
    "invalid_api_key": "Send one of the keys of `server.api_keys` as `Authorization: Bearer KEY` or `x-api-key`.",
    "invalid_request_error": "Correct the field that `param` names.",
    "knowledge_base_error": "Try again; look at the service that the `[knowledge.NAME]` table names.",
    "method_not_allowed": "Use the method that the route takes.",
    "http_error": "Correct the request line.",
    "model_not_found": "Ask for a model that `/v1/models` lists, or add a `[models.NAME]` table or an alias.",
    "model_unavailable": "`agentspec model fetch NAME` says what is missing; `agentspec doctor` checks the rest.",
    "no_server_available": "Wait as long as `Retry-After` says; `/fleet` shows the servers' states to operators.",
    "not_ready": "Wait until `/ready` answers 200.",
    "origin_not_allowed": "Call the gateway from a server or a program, or set `server.api_keys`.",
    "overloaded": "Wait as long as `Retry-After` says; raise `server.max_concurrent` or `queue_timeout`.",
    "permission_denied": "Use a key of the other `role` in `server.api_keys`.",
    "rate_limit_exceeded": "Wait as long as `Retry-After` says, or raise the limit of the key.",
    "request_over_rate_limit": "Ask for fewer tokens, or raise `tokens_per_minute` of the key.",
    "request_timeout": "Ask for fewer tokens, stream, or raise `server.request_timeout`.",
    "request_too_large": "Send less, or raise `server.max_body_bytes`.",
    "response_not_found": "Use an id of the same tenant that was stored and not deleted.",
    "server_error": "The message says what failed.",
    "shutting_down": "Send the request to another gateway, or again after the restart.",
    "unknown_route": "Use a [route of the gateway](gateway.md#routes), and a base URL that ends in `/v1`.",
    "upstream_authentication": "Correct the `api_key` of the backend, or what the key may use.",
    "upstream_isolation": "Set `shared_upstream` or `server_kind`: [tenants](gateway.md#tenants-at-an-upstream).",
    "upstream_status": "The status and the message are the upstream's own.",
    "upstream_timeout": "Raise `read_timeout` of the backend, or look at the upstream.",
    "upstream_unreachable": "Start the upstream, or correct `base_url`; `agentspec doctor` tries it.",
}
_OTHER_CODES = {  # without a class of their own
    "internal_error": (500, "an unexpected error"),
    "method_not_allowed": (405, "the route does not take this method"),
    "http_error": (None, "a request that no route can read"),
    "response_not_found": (404, "no stored response has this id"),
    "unknown_route": (404, "no route has this path"),
}


def error_lines() -> str:
    """Each code with its status, when it is reported, and what to do."""
    meaning = re.findall(r"(\w+Error) +(?:\d+)? +(.+)", errors.__doc__ or "")
    found = dict(_OTHER_CODES)
    for name, text in [*meaning, ("AgentSpecError", "an error of another kind")]:
        error = getattr(errors, name)
        status = None if error is errors.UpstreamStatusError else error.status
        found[error.code or error.type] = status, text
    if found.keys() != WHAT_TO_DO.keys():
        sys.exit(f"WHAT_TO_DO lacks, or needs no longer: {sorted(found.keys() ^ WHAT_TO_DO.keys())}")
    return "\n\n".join(_error_line(code, *found[code]) for code in sorted(found))


def _error_line(code: str, status: int | None, text: str) -> str:
    return f"### {code}\n\n{f'{status}: ' if status else ''}{text}. {WHAT_TO_DO[code]}"


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
    write(FOLDER / "errors.md", "errors", error_lines())
    write(FOLDER / "results.md", "gpu", gpu_table())


if __name__ == "__main__":
    main()
