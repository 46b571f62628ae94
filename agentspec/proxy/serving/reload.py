"""Takes over changed keys and limits while the gateway runs."""

from __future__ import annotations

import signal
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

import anyio

from agentspec.backends.settings import BackendSettings, OpenAISettings
from agentspec.errors import ConfigurationError
from agentspec.proxy.admission.auth import Authenticator
from agentspec.proxy.logs import logger
from agentspec.proxy.serving.tls import load_certificate
from agentspec.settings.load import Settings
from agentspec.settings.server import ServerSettings

RELOADABLE = frozenset(
    "api_keys key_limits allowed_hosts max_body_bytes max_messages max_concurrent request_timeout drain_timeout"
    " speculation_object tls_cert_file tls_key_file max_connections_per_address max_header_bytes header_timeout"
    " min_body_rate body_rate_window keep_alive_timeout write_timeout max_choices max_output_tokens max_logprobs"
    " max_prompts max_embedding_inputs max_tools queue_timeout max_queued stream_pacing stream_pacing_characters"
    " tenants".split()
)
"""What of `[server]` takes effect without a restart."""


RELOADABLE_SERVERS = ("base_urls", "base_urls_file", "weight")
"""What of `[backends.NAME]` does, where it has several servers."""


class Applies(Protocol):
    """What takes over keys and limits: the gateway's application."""

    async def check(self, settings: ServerSettings) -> None: ...

    def apply(self, settings: ServerSettings, authenticator: Authenticator) -> None: ...

    def reach(self, backends: Mapping[str, BackendSettings]) -> None:
        """Use other servers of backends with several."""


class Limited(Protocol):
    """What takes over a certificate and limits on connections: its server."""

    @property
    def tls(self) -> ssl.SSLContext | None: ...

    def limit(self, settings: ServerSettings) -> None: ...


class Reloader:
    """Reads the settings anew on SIGHUP and applies what can change. Without `load` the signal is ignored."""

    def __init__(self, server: Limited, app: Applies, settings: Settings, load: Callable[[], Settings] | None) -> None:
        self._server = server
        self._app = app
        self._load = load
        self._asked = False
        self.settings = settings

    @contextmanager
    def on_signal(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # only this one can be told of signals
            yield
            return
        before = signal.signal(signal.SIGHUP, self._ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGHUP, before)

    def _ask(self, sig: int, frame: FrameType | None) -> None:
        self._asked = True

    async def reload_if_asked(self) -> None:
        """Reload after a signal. Settings that cannot be used change nothing, and are logged."""
        if not self._asked:
            return
        self._asked = False
        if self._load is None:
            return
        try:
            wanted = await anyio.to_thread.run_sync(self._load)
            await self._app.check(wanted.server)
            self.apply(wanted)
        except ConfigurationError as error:
            logger.error("configuration not reloaded; the old one stays", reason=error.message)
        except Exception as error:
            logger.error("configuration not reloaded; the old one stays", exception=type(error).__name__)

    def apply(self, wanted: Settings) -> None:
        """Use the keys, limits and certificate of `wanted`. Raises `ConfigurationError` and then changes nothing.

        Keys are read anew even if no setting changed, since they stand in files.
        """
        new = {name: getattr(wanted.server, name) for name in RELOADABLE}
        server = self.settings.server.model_copy(update=new)
        _refuse_to_open(self.settings.server, server)
        authenticator = Authenticator(server.api_keys)
        if self._server.tls is not None:
            load_certificate(self._server.tls, server)
        self._app.apply(server, authenticator)
        self._server.limit(server)
        backends = with_servers(self.settings.backends, wanted.backends)
        if backends != self.settings.backends:
            self._app.reach(backends)
        current = self.settings.model_copy(update={"backends": backends})
        restart = restart_needed(current, wanted)
        self.settings = current.model_copy(update={"server": server})
        logger.info("configuration reloaded", keys=len(server.api_keys), needs_restart=restart)


def with_servers(
    current: Mapping[str, BackendSettings], wanted: Mapping[str, BackendSettings]
) -> dict[str, BackendSettings]:
    """`current` with the addresses and weights in `wanted` of backends that have several servers."""
    found = dict(current)
    for name, one in current.items():
        other = wanted.get(name)
        if isinstance(one, OpenAISettings) and isinstance(other, OpenAISettings) and _found_alike(one, other):
            found[name] = one.model_copy(update={key: getattr(other, key) for key in RELOADABLE_SERVERS})
    return found


def _found_alike(one: OpenAISettings, other: OpenAISettings) -> bool:
    """Whether both have several servers, and find them by the same name or by none."""
    several = one.has_several_servers and other.has_several_servers
    return several and (one.resolve, one.base_url) == (other.resolve, other.base_url)


def restart_needed(current: Settings, wanted: Settings) -> list[str]:
    """The settings that differ and take effect only after a restart."""
    fields = [name for name in ServerSettings.model_fields if name not in RELOADABLE]
    changed = [f"server.{name}" for name in fields if getattr(current.server, name) != getattr(wanted.server, name)]
    if (current.server.tls_cert_file is None) != (wanted.server.tls_cert_file is None):
        changed.append("server.tls_cert_file")
    others = (name for name in Settings.model_fields if name != "server")
    return changed + [name for name in others if getattr(current, name) != getattr(wanted, name)]


def _refuse_to_open(current: ServerSettings, wanted: ServerSettings) -> None:
    """Raise `ConfigurationError` if the last key is gone, which would let everybody in."""
    if current.api_keys and not wanted.api_keys:
        raise ConfigurationError("server.api_keys is empty: serving everybody takes a restart")
