"""Settings of pools, and what a pool is made of."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from agentspec.settings_model import SettingsModel


class FleetSettings(SettingsModel):
    """`[fleet]`: how the servers of pools are watched, and when a call is tried again."""

    failures: int = Field(default=5, ge=1, description="Failures that open a server's circuit breaker")
    open_seconds: float = Field(default=10.0, gt=0, description="Seconds without calls then, before a single trial")
    max_retries: int = Field(default=2, ge=0, le=10, description="Further tries of a call of which nothing came back")


@dataclass(frozen=True, slots=True)
class PoolTarget:
    """A part of a pool: the servers of the backend `backend`, asked for `model`; None leaves the name as it is."""

    backend: str
    model: str | None


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """A pool to build: where its calls go, and by which policy."""

    name: str
    targets: tuple[PoolTarget, ...]
    placement: str
