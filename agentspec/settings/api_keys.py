"""API keys: their tenants, and reading the keys from variables and files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, model_validator

from agentspec.backends.key_files import read_secret
from agentspec.errors import ConfigurationError
from agentspec.settings.rate_limits import RateLimits
from agentspec.types import DEFAULT_TENANT

Role = Literal["tenant", "operator"]


class ApiKey(RateLimits):
    """One `[[server.api_keys]]` entry: the key's tenant and limits, and the variable or file that holds the key."""

    tenant: str = Field(default=DEFAULT_TENANT, min_length=1, description="Whose cached tokens the key reaches")
    role: Role = Field(default="tenant", description="`operator`: reads `/metrics` instead of using models")
    name: str | None = Field(
        default=None,
        pattern=r"^[\x20-\x7e]{1,128}$",
        description="What it is called; unset: the variable or file. Keys of a tenant with the same name count as one"
        " for their limits, so that one can replace another",
    )
    key_env: str | None = Field(default=None, description="Environment variable holding the key")
    key_file: Path | None = Field(default=None, description="File holding the key")

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.key_env is None) == (self.key_file is None):
            raise ValueError("give exactly one of key_env and key_file")
        return self

    @model_validator(mode="after")
    def _operators_have_no_limits(self) -> Self:
        if self.role == "operator" and not self.unlimited:
            raise ValueError("an operator's key uses no models, so limits on it do nothing: leave them out")
        return self

    @property
    def own_limits(self) -> RateLimits:
        """The limits that the entry itself sets."""
        return RateLimits(**{name: getattr(self, name) for name in RateLimits.model_fields})

    @property
    def label(self) -> str:
        """What the key is called among those of its tenant."""
        return self.name or self.key_env or str(self.key_file)

    def secret(self) -> SecretStr:
        """Read the key and strip surrounding blanks. Raises `ConfigurationError` if it is missing, empty or no line."""
        value = os.environ.get(self.key_env, "") if self.key_env is not None else read_secret(self.key_file)
        where = f"environment variable {self.key_env!r}" if self.key_env else f"file {str(self.key_file)!r}"
        if not value.strip():
            whose = f"tenant {self.tenant!r}" if self.role == "tenant" else "an operator"
            raise ConfigurationError(f"the API key of {whose} is empty: set the {where}")
        if not value.strip().isprintable():
            raise ConfigurationError(f"the {where} must hold a single line of text, or no client can send the key")
        return SecretStr(value.strip())


def read_keys(keys: Iterable[ApiKey]) -> list[tuple[SecretStr, ApiKey]]:
    """Read every API key; returns (key, entry) pairs. Raises `ConfigurationError` if entries that differ in tenant,
    role or limits share a key.
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
        if owner.own_limits != key.own_limits:
            raise ConfigurationError(
                f"two entries of tenant {key.tenant!r} have the same API key and other limits: leave one of them out"
            )
    return read
