"""The HTTP library: httpx2, which the extra `proxy` brings, or else httpx. Both have the same interface."""

from __future__ import annotations

try:
    import httpcore2 as httpcore
    import httpx2 as httpx
except ModuleNotFoundError:
    import httpcore  # type: ignore[no-redef]
    import httpx  # type: ignore[no-redef]

__all__ = ["httpcore", "httpx"]
