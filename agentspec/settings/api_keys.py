"""API keys: their tenants, and reading the keys from variables and files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from agentspec.errors import ConfigurationError
from agentspec.types import DEFAULT_TENANT

Role = Literal["tenant", "operator"]


class ApiKey(BaseModel):
    """One `[[server.api_keys]]` entry: the key's tenant, and the variable or file that holds the key."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tenant: str = Field(default=DEFAULT_TENANT, min_length=1, description="Whose cached tokens the key reaches")
    role: Role = Field(default="tenant", description="`operator`: reads `/metrics` instead of using models")
    key_env: str | None = Field(default=None, description="Environment variable holding the key")
    key_file: Path | None = Field(default=None, description="File holding the key")

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.key_env is None) == (self.key_file is None):
            raise ValueError("give exactly one of key_env and key_file")
        return self

    def secret(self) -> SecretStr:
        """Read the key and strip surrounding blanks. Raises `ConfigurationError` if it is missing or empty."""
        value = os.environ.get(self.key_env, "") if self.key_env is not None else read_secret(self.key_file)
        if not value.strip():
            where = f"environment variable {self.key_env!r}" if self.key_env else f"file {str(self.key_file)!r}"
            whose = f"tenant {self.tenant!r}" if self.role == "tenant" else "an operator"
            raise ConfigurationError(f"the API key of {whose} is empty: set the {where}")
        return SecretStr(value.strip())


def read_keys(keys: Iterable[ApiKey]) -> list[tuple[SecretStr, ApiKey]]:
    """Read every API key; returns (key, entry) pairs. Raises `ConfigurationError` if entries that differ in tenant or
    role share a key.
    """
    read = [(key.secret(), key) for key in keys]
    owners: dict[str, ApiKey] = {}
    for secret, key in read:
        owner = owners.setdefault(secret.get_secret_value(), key)
        if owner.tenant != key.tenant:
            raise ConfigurationError(
                f"tenants {owner.tenant!r} and {key.tenant!r} have the same API key, so nobody could tell whose a"
                " request is: give each a key of its own"
            )
        if owner.role != key.role:
            raise ConfigurationError(
                f"an operator and tenant {key.tenant!r} have the same API key: give the operator a key of its own"
            )
    return read


def read_secret(path: Path | str | None) -> str:
    """The text of a key file without surrounding blanks. Raises `ConfigurationError` if it cannot be read."""
    file = Path(path or "").expanduser()
    try:
        return file.read_text().strip()
    except OSError as error:
        raise ConfigurationError(f"cannot read the key file {str(file)!r}: {error.strerror}") from None
