"""Recognises values that name a place to connect to, and the media that a message may carry."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Set
from urllib.parse import urlsplit

_HEAD = 256  # characters of a value that decide what it is
# What URL parsers skip: blanks and controls in front, tabs and line ends everywhere.
_SKIPPED = re.compile("[\t\r\n]|^[\x00-\x20\x7f\ufeff\u200b-\u200f\u2060]+")
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*:[/\\]|[/\\]{2}|(?:file|gopher|dict|ldap|jar|netdoc|unix):", re.IGNORECASE)
_BASE64 = re.compile(r"[A-Za-z0-9+/_=\s-]*+")
_SAFE_URL = re.compile(r"[!-\[\]-~]+")  # printable ASCII without blanks and backslashes, which parsers read differently
_PORTS = {"http": 80, "https": 443}


def is_address(text: str) -> bool:
    """Whether `text` begins like a URL of any scheme, or like a network path. A `data:` URL names no place."""
    start = text[:_HEAD]
    if start.isascii() and ":" not in start and "/" not in start and "\\" not in start:
        return False
    return _ADDRESS.match(_head(text)) is not None


def is_inline(text: str) -> bool:
    """Whether `text` is a `data:` URL, which carries its content itself."""
    return _head(text)[:5].lower() == "data:"


def is_base64(text: str) -> bool:
    return _BASE64.fullmatch(text) is not None


def is_on(url: str, hosts: Set[str]) -> bool:
    """Whether `url` is an http or https URL on one of `hosts`: names in lower case, with `:port` for unusual ports."""
    if not hosts or not _SAFE_URL.fullmatch(url):
        return False
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    usual = _PORTS.get(parts.scheme)
    if usual is None or not parts.hostname or "@" in parts.netloc:
        return False
    return (parts.hostname if port in (None, usual) else f"{parts.hostname}:{port}") in hosts


def _head(text: str) -> str:
    head = text[:_HEAD]
    return _SKIPPED.sub("", head if head.isascii() else unicodedata.normalize("NFKC", head))
