"""Numbers that every setting refuses, wherever it stands."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, nan
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ByteSize, ValidationError

from agentspec.backends.engine_plugin import settings as engine_plugin
from agentspec.benchmarks.placement import scenario
from agentspec.settings import load

SETTINGS = (engine_plugin, scenario, load)  # what they import belongs to it


def of(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for one in kind.__subclasses__():
        yield one
        yield from of(one)


def parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for part in get_args(annotation):
        yield from parts(part)


def numbers() -> Iterator[tuple[type[BaseModel], str]]:
    for kind in dict.fromkeys(of(BaseModel)):
        ours = kind.__module__.startswith("agentspec.")
        if ours and ("settings" in kind.__module__ or kind.__module__ == scenario.__name__):
            for name, field in kind.model_fields.items():
                if {float, int, ByteSize} & {part for part in parts(field.annotation) if isinstance(part, type)}:
                    yield kind, name


def test_the_numbers_of_all_parts_are_looked_at() -> None:
    found = {f"{kind.__name__}.{name}" for kind, name in numbers()}
    assert found > {
        "ServerSettings.request_timeout",
        "CacheSettings.retention",
        "OpenAISettings.read_timeout",
        "TorchSettings.kv_bytes",
        "FleetSettings.open_seconds",
        "KnnLmSettings.temperature",
        "RemoteSettings.timeout",
        "EngineCosts.step",
        "Scenario.rate",
    }


@pytest.mark.parametrize("value", [inf, -inf, nan])
def test_neither_infinity_nor_what_is_no_number_is_taken(value: float) -> None:
    for kind, name in numbers():
        with pytest.raises(ValidationError) as caught:
            kind.model_validate({name: value})
        assert name in {error["loc"][0] for error in caught.value.errors()}, (kind, name)
