"""Where the server listens: an address and a port, or a Unix socket."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager

import psutil

from toolkit.config import ServerConfig
from toolkit.errors import ConfigError


def listen(config: ServerConfig) -> AbstractContextManager[socket.socket]:
    """A bound socket, closed at the end. Raises ConfigError when somebody else has the place."""
    return bind(config.host, config.port) if config.uds is None else bind_unix(config.uds)


@contextlib.contextmanager
def bind(host: str, port: int) -> Iterator[socket.socket]:
    """A bound socket, closed at the end. Raises ConfigError naming the process that has the port."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: {error.strerror}.", param="host") from None
    listener = socket.socket(family, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind(address)
        # Until it listens, another server could bind beside it, and fail when both have loaded their models.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        listener.close()
        if isinstance(error, PermissionError):
            raise ConfigError(
                f"Port {port} is not for ordinary users: use --port 1024 or above.", param="port"
            ) from None
        raise ConfigError(
            f"{host}:{port} cannot be listened on: {(error.strerror or str(error)).lower()}{_holder(port)}. "
            "Use --port for another; 0 takes a free one.",
            param="port",
        ) from None
    try:
        yield listener
    finally:
        listener.close()


def _holder(port: int) -> str:
    """Which process listens on a port, as far as the system tells."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if (
                connection.status == psutil.CONN_LISTEN
                and connection.laddr[1:] == (port,)
                and connection.pid
            ):
                command = " ".join(psutil.Process(connection.pid).cmdline())[:80]
                return f", by process {connection.pid} ({command})"
    return ""


@contextlib.contextmanager
def bind_unix(path: str) -> Iterator[socket.socket]:
    """A bound Unix socket, closed and removed at the end. One that nobody listens on any more is replaced. Raises
    ConfigError.
    """
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as listener:
        try:
            if _is_abandoned(path):
                os.unlink(path)
            listener.bind(path)
        except OSError as error:
            raise ConfigError(
                f"--uds {path} cannot be listened on: {(error.strerror or str(error)).lower()}.",
                param="uds",
            ) from None
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _is_abandoned(path: str) -> bool:
    if not os.path.exists(path) or not stat.S_ISSOCK(os.stat(path).st_mode):
        return False
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        return probe.connect_ex(path) != 0


def tls(config: ServerConfig) -> ssl.SSLContext | None:
    """The server's side of TLS, None without. Raises ConfigError for files that cannot be used."""
    if config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--ssl-certfile {config.ssl_certfile} with --ssl-keyfile {config.ssl_keyfile} cannot be used: {error}.",
            param="ssl_certfile",
        ) from None
    if config.ssl_ca_certs is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"--ssl-ca-certs {config.ssl_ca_certs} cannot be used: {error}.",
                param="ssl_ca_certs",
            ) from None
    return context
