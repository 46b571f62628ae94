"""Settings of the gateway: its keys, their tenants and limits, and the bounds of what it takes."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, Self

from pydantic import ByteSize, Field, SecretStr, model_validator

from agentspec.backends.settings import read_secret
from agentspec.errors import ConfigurationError
from agentspec.settings_model import SettingsModel
from agentspec.types import DEFAULT_TENANT

Role = Literal["tenant", "operator"]
MIN_SECRET = 32


class RateLimits(SettingsModel):
    """What one key may ask for; unset: no limit."""

    requests_per_minute: int | None = Field(default=None, ge=1, description="Requests in 60 seconds; unset: no limit")
    tokens_per_minute: int | None = Field(
        default=None, ge=1, description="Tokens of prompts and answers in 60 seconds; unset: no limit"
    )

    @property
    def unlimited(self) -> bool:
        """Whether there is no limit at all."""
        return not any(getattr(self, name) for name in RateLimits.model_fields)


class ApiKey(RateLimits):
    """One `[[server.api_keys]]` entry: the key's tenant and limits, and the variable or file that holds the key."""

    tenant: str = Field(default=DEFAULT_TENANT, min_length=1, description="Tenant that the key belongs to")
    role: Role = Field(default="tenant", description="`operator`: reads `/metrics` instead of using models")
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
            raise ValueError("an operator's key cannot use models, so limits have no effect: remove them")
        return self

    @property
    def own_limits(self) -> RateLimits:
        """The limits that the entry itself sets."""
        return RateLimits(**{name: getattr(self, name) for name in RateLimits.model_fields})

    @property
    def label(self) -> str:
        """What the key is called among those of its tenant."""
        return self.key_env or str(self.key_file)

    def secret(self) -> SecretStr:
        """Read the key and strip surrounding blanks. Raises `ConfigurationError` if it is missing, empty or no line."""
        value = os.environ.get(self.key_env, "") if self.key_env is not None else read_secret(self.key_file)
        where = f"environment variable {self.key_env!r}" if self.key_env else f"file {str(self.key_file)!r}"
        if not value.strip():
            owner = f"tenant {self.tenant!r}" if self.role == "tenant" else "an operator"
            raise ConfigurationError(f"the API key of {owner} is empty: set the {where}")
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
            pair, advice = f"tenants {owner.tenant!r} and {key.tenant!r}", "give each a key of its own"
        elif owner.role != key.role:
            pair, advice = f"an operator and tenant {key.tenant!r}", "give the operator a key of its own"
        elif owner.own_limits != key.own_limits:
            pair, advice = f"two entries of tenant {key.tenant!r} with other limits", "leave one of them out"
        else:
            continue
        raise ConfigurationError(f"{pair} have the same API key: {advice}")
    return read


class TenantLimits(SettingsModel):
    """`[server.tenants.NAME]`: one tenant's share of the slots for requests."""

    weight: float = Field(default=1.0, gt=0, description="Share of the slots under load")
    max_concurrent: int | None = Field(default=None, ge=1, description="Most slots of this tenant; unset: all")


class ServerSettings(SettingsModel):
    """`[server]`: the gateway."""

    host: str = Field(default="127.0.0.1", description="Address to listen on; loopback unless you say otherwise")
    port: int = Field(default=8700, ge=0, le=65535, description="Port to listen on; 0 takes a free one")
    api_keys: tuple[ApiKey, ...] = Field(
        default=(), description="Keys that clients must send; unset: all who reach the port may use it"
    )
    max_body_bytes: ByteSize = Field(default=ByteSize(8 << 20), gt=0, description="Larger request bodies get 413")
    max_concurrent: int = Field(default=256, ge=1, description="Requests in the whole gateway; further ones wait")
    request_timeout: float = Field(default=600.0, gt=0, description="Seconds a request may take before 504")
    drain_timeout: float = Field(default=30.0, ge=0, description="Seconds running requests get after SIGTERM")

    ui: bool = Field(default=True, description="Show the page /ui, whose data needs a key as all other routes do")

    # Bodies.
    max_body_memory: ByteSize = Field(
        default=ByteSize(256 << 20),
        gt=0,
        description="Memory for the bodies of running requests; up to half of it for answers above 64 KiB that are not"
        " streamed, and for one tenant. Above it a body gets 429, an answer waits and then gets 503",
    )
    max_output_tokens: int = Field(default=131072, ge=1, description="Largest max_tokens of a request to an upstream")

    # Admission.
    queue_timeout: float = Field(
        default=2.0, ge=0, description="Seconds a request may wait for a slot before 429; 0: not at all"
    )
    tenants: dict[str, TenantLimits] = Field(default_factory=dict, description="Tables [server.tenants.NAME]")

    # Connections.
    allowed_hosts: tuple[str, ...] = Field(
        default=(),
        description='Host names that clients may use besides loopback and `host`; "*.example.com" for subdomains, "*"'
        " for all. Unset: all with api_keys, no others without",
    )
    max_connections: int = Field(
        default=4096, ge=1, description="Most connections; fewer if the process may not open that many files"
    )

    # Requests that the gateway answers itself.
    hosted_tools: Literal["refuse", "drop"] = Field(
        default="refuse",
        description="Tools that run only at a hosted service (web_search, code_interpreter, ...): `refuse` answers 400"
        " for other models, `drop` removes them and their calls, and lists them in the header x-agentspec-dropped",
    )

    # Upstreams.
    secret: SecretStr | None = Field(
        default=None,
        description="Secret of the salts that isolate tenants at upstreams, 32 characters or more, from the environment"
        " or secret_file; unset: a new one at each start, so that the upstreams' prefix caches begin empty",
    )
    secret_file: Path | None = Field(default=None, description="File holding the secret")

    @model_validator(mode="after")
    def _tenants_fit(self) -> Self:
        known = dict.fromkeys([*(key.tenant for key in self.api_keys), DEFAULT_TENANT])
        if unknown := [name for name in self.tenants if name not in known]:
            raise ValueError(f"server.tenants.{unknown[0]} is the tenant of no API key; known: {', '.join(known)}")
        return self

    @property
    def limits_of_keys(self) -> dict[tuple[str, str], RateLimits]:
        """The limits of each tenant's keys, by tenant and label; keys without limits are not in it."""
        tenants = (key for key in self.api_keys if key.role == "tenant")
        return {(key.tenant, key.label): key.own_limits for key in tenants if not key.unlimited}

    @property
    def tenant_names(self) -> frozenset[str]:
        """The tenants that have a key."""
        return frozenset(key.tenant for key in self.api_keys if key.role == "tenant")

    def read_secret(self) -> bytes:
        """The secret, a random one if none is set. Raises `ConfigurationError` for a short one."""
        if self.secret is None and self.secret_file is None:
            return secrets.token_bytes(32)
        given = read_secret(self.secret_file) if self.secret is None else self.secret.get_secret_value().strip()
        if len(given) < MIN_SECRET:
            raise ConfigurationError(f"server.secret must have {MIN_SECRET} characters or more: openssl rand -hex 32")
        return given.encode()
