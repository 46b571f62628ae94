"""How much a cache may keep."""

from __future__ import annotations

from dataclasses import dataclass, fields

from agentspec.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """Bytes in memory and on disk, of all tenants and of each, and the namespaces of a tenant that are in memory at
    once. None: no limit. Raises `ConfigurationError`, which names the limit, unless each is 1 or more.
    """

    memory_bytes: int
    tenant_memory_bytes: int | None = None
    tenant_namespaces: int | None = None
    disk_bytes: int | None = None
    tenant_disk_bytes: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            limit = getattr(self, field.name)
            if limit is None and field.name != "memory_bytes":
                continue
            if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
                kind = "a positive number of bytes" if field.name.endswith("bytes") else "1 or more, or None"
                raise ConfigurationError(f"{field.name} must be {kind}, not {limit!r}")
