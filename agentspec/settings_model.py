"""What all parts of the settings are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from agentspec.errors import suggestion


class SettingsModel(BaseModel):
    """A part of the settings. It refuses names that it does not know, and says which it knows; infinity; what is no
    number; and true or false in place of a number, which pydantic takes for 1 and 0.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _takes(cls, given: Any) -> Any:
        fields, wrong = cls.model_fields, dict[str, str]()
        for name, value in given.items() if isinstance(given, Mapping) else ():
            if name not in fields:
                hint = suggestion(str(name), fields) or f"; known: {', '.join(fields)}"
                wrong[str(name)] = f"unknown key{hint}"
            elif _is_number(fields[name].annotation) and any(isinstance(one, bool) for one in _single(value)):
                wrong[name] = "must be a number, not true or false"
        if wrong:
            said = "\n".join(f"{key}: {reason}" for key, reason in wrong.items())
            raise PydanticCustomError("wrong_keys", "{said}", {"said": said, "wrong": wrong})
        return given


def _is_number(annotation: Any) -> bool:
    kinds = get_args(annotation) or (annotation,)
    return bool not in kinds and any(isinstance(kind, type) and issubclass(kind, int | float) for kind in kinds)


def _single(value: Any) -> Any:
    """The values of a list or a table, or the value itself."""
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else (value,)
