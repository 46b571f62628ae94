"""Reads files that hold keys and secrets."""

from __future__ import annotations

from pathlib import Path

from agentspec.errors import ConfigurationError


def read_secret(path: Path | str | None, name: str = "the key file") -> str:
    """The text of a key file without surrounding blanks. Raises `ConfigurationError` if it cannot be read."""
    try:
        return Path(path or "").expanduser().read_text("utf-8-sig").strip()
    except (OSError, ValueError, RuntimeError) as error:  # the last for the home of a user whom there is not
        reason = (
            "it is not UTF-8 text" if isinstance(error, UnicodeError) else getattr(error, "strerror", None) or error
        )
        raise ConfigurationError(f"cannot read {name} {str(path or '')!r}: {reason}") from None


def sendable(key: str, name: str) -> str:
    """`key`, which goes into a header. Raises `ConfigurationError`, without quoting it, if it cannot."""
    if not key:
        raise ConfigurationError(f"{name} is empty: leave it out if the server wants no key")
    if not (key.isascii() and key.isprintable()):
        raise ConfigurationError(f"{name} must be a single line of printable ASCII characters")
    return key
