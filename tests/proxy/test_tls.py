"""HTTPS: what is served and what is refused."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import httpx
import pydantic
import pytest

from agentspec.errors import ConfigurationError
from agentspec.proxy.serving import tls_context
from agentspec.settings.server import ServerSettings
from agentspec.testing import FakeBackend
from agentspec.types import Delta, GenerateRequest

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `a.pem` and `b.pem`, certificates for localhost, and their keys."""
    folder = tmp_path_factory.mktemp("certificates")
    for name in "ab":
        command = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN={name}"
        command += f" -addext subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout {name}.key -out {name}.pem"
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    (folder / "both.pem").write_text((folder / "a.pem").read_text() + (folder / "a.key").read_text())
    (folder / "nonsense.pem").write_text("nonsense")
    encrypt = ["openssl", "ec", "-aes256", "-passout", "pass:x", "-in", "a.key", "-out", "encrypted.key"]
    subprocess.run(encrypt, cwd=folder, check=True, capture_output=True)
    return folder


def served(folder: Path, name: str = "a") -> ServerSettings:
    return ServerSettings(tls_cert_file=folder / f"{name}.pem", tls_key_file=folder / f"{name}.key")


def subject(url: str) -> Any:
    """The subject's name in the certificate that the server shows."""
    host, port = url.split("//")[1].split(":")
    pem = ssl.get_server_certificate((host, int(port)))
    text = subprocess.run(["openssl", "x509", "-noout", "-subject"], input=pem, text=True, capture_output=True).stdout
    return text.strip()[-1]


def test_https_is_served(gateway: Any, certificates: Path, until: Callable[..., None]) -> None:
    settings = served(certificates)
    running = gateway({"fake": FakeBackend("fine")}, **settings.model_dump(include={"tls_cert_file", "tls_key_file"}))
    url = running.url.replace("http:", "https:")
    trusted = ssl.create_default_context(cafile=str(certificates / "a.pem"))
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, verify=trusted)
    assert answer.status_code == 200 and "[DONE]" in answer.text
    assert subject(url) == "a"
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    with pytest.warns(DeprecationWarning):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    host, port = url.split("//")[1].split(":")
    with pytest.raises(ssl.SSLError), socket.create_connection((host, int(port)), timeout=60) as connection:
        old.wrap_socket(connection).close()
    until(lambda: not running.server.server_state.connections)


class EndlessAnswers:
    """Produces a kilobyte at a time for as long as somebody takes it."""

    capabilities = FakeBackend().capabilities

    async def generate(self, request: GenerateRequest) -> Any:
        while True:
            await anyio.sleep(0)
            yield Delta(text="x" * 1000)

    async def aclose(self) -> None: ...


def test_a_client_that_does_not_read_is_cut_off(gateway: Any, certificates: Path, until: Callable[..., None]) -> None:
    options = served(certificates).model_dump(include={"tls_cert_file", "tls_key_file"})
    running = gateway({"fake": EndlessAnswers()}, write_timeout=1.0, **options)
    client = ssl.create_default_context(cafile=str(certificates / "a.pem"))
    content = b'{"model": "fake", "stream": true, "messages": [{"role": "user", "content": "hi"}]}'
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    address = ("127.0.0.1", int(running.url.rpartition(":")[2]))
    with (
        socket.create_connection(address, timeout=60) as connection,
        client.wrap_socket(connection, server_hostname="localhost") as reader,
    ):
        reader.sendall(head + b"content-length: %d\r\n\r\n" % len(content) + content)
        assert reader.recv(1000)
        highest = 0
        while running.app.limiter.running:
            highest = max(
                [
                    highest,
                    *(one.transport.get_write_buffer_size() for one in tuple(running.server.server_state.connections)),
                ]
            )
            time.sleep(0.01)
    assert 0 < highest <= 64 << 10
    until(lambda: not running.server.server_state.connections)


@pytest.mark.parametrize(
    ("certificate", "key", "said"),
    [
        ("a.pem", "b.key", "cannot be used"),
        ("nonsense.pem", "a.key", "cannot be used"),
        ("a.pem", "nonsense.pem", "cannot be used"),
        ("a.pem", None, "cannot be used"),
        ("a.pem", "encrypted.key", "must be unencrypted"),
        ("none.pem", "a.key", "server.tls_cert_file = .*none.pem.*No such file"),
        ("a.pem", "none.key", "server.tls_cert_file = .*none.key.*No such file"),
    ],
)
def test_unusable_files_are_reported(certificates: Path, certificate: str, key: str | None, said: str) -> None:
    file = None if key is None else certificates / key
    with pytest.raises(ConfigurationError, match=said):
        tls_context(ServerSettings(tls_cert_file=certificates / certificate, tls_key_file=file))


def test_one_file_may_hold_both(certificates: Path) -> None:
    assert tls_context(ServerSettings(tls_cert_file=certificates / "both.pem")) is not None
    assert tls_context(ServerSettings()) is None


def test_a_key_needs_its_certificate() -> None:
    with pytest.raises(pydantic.ValidationError, match="tls_cert_file"):
        ServerSettings(tls_key_file=Path("a.key"))
