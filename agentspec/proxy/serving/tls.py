"""The server's side of TLS."""

from __future__ import annotations

import ssl

from agentspec.errors import ConfigurationError
from agentspec.settings.server import ServerSettings


def tls_context(server: ServerSettings) -> ssl.SSLContext | None:
    """A context for TLS 1.2 and later with the configured certificate; None if HTTP is served.

    Raises `ConfigurationError` for files that cannot be read, or that do not belong together.
    """
    if server.tls_cert_file is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    load_certificate(context, server)
    return context


def load_certificate(context: ssl.SSLContext, server: ServerSettings) -> None:
    """Use the configured certificate from now on. Raises `ConfigurationError` and then changes nothing."""
    certificate, key = server.tls_cert_file, server.tls_key_file
    if certificate is None:
        raise ConfigurationError("server.tls_cert_file is unset; serving HTTP in place of HTTPS takes a restart")
    files = [file.expanduser() for file in (certificate, key) if file is not None]
    for file in files:
        try:
            file.read_bytes()
        except OSError as error:
            where = "server.tls_cert_file" if file == files[0] else "server.tls_key_file"
            raise ConfigurationError(f"{where} = {str(file)!r} cannot be read: {error.strerror}") from None
    try:
        for target in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), context):  # a failed load leaves a context half changed
            target.load_cert_chain(files[0], files[-1], password=lambda: b"")  # or OpenSSL asks on the terminal
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or "not PEM, or encrypted"
        raise ConfigurationError(
            f"server.tls_cert_file = {str(certificate)!r} and its key cannot be used together: {reason};"
            " the key must be unencrypted PEM and belong to the first certificate"
        ) from None
