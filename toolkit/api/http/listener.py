"""The listening socket: an address and a port, or a Unix socket. TLS."""

import contextlib
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager

from toolkit.config import ServerConfig
from toolkit.errors import ConfigError
from toolkit.hardware.ports import bind_failure


def listen(config: ServerConfig) -> AbstractContextManager[socket.socket]:
    """Bind the configured socket for the block. Raises ConfigError if it is in use."""
    return bind(config.host, config.port) if config.uds is None else bind_unix(config.uds)


@contextlib.contextmanager
def bind(host: str, port: int) -> Iterator[socket.socket]:
    """Bind a socket for the block. Raises ConfigError; it names the process that uses the port."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: {error.strerror}.", param="host") from None
    listener = socket.socket(family, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind(address)
        # With SO_REUSEADDR another server could bind too, as long as neither listens. It would fail
        # only after loading its model.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        listener.close()
        if isinstance(error, PermissionError):
            raise ConfigError(
                f"Port {port} needs root privileges: use --port 1024 or above.", param="port"
            ) from None
        raise ConfigError(
            f"Cannot listen on {host}:{port}: {bind_failure(error, port)}. "
            "Set another --port; 0 is any free port.",
            param="port",
        ) from None
    try:
        yield listener
    finally:
        listener.close()


@contextlib.contextmanager
def bind_unix(path: str) -> Iterator[socket.socket]:
    """Bind a Unix socket for the block, and remove it at the end. Raises ConfigError.

    Replaces a socket that no process listens on."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as listener:
        try:
            if _is_abandoned(path):
                os.unlink(path)
            listener.bind(path)
        except OSError as error:
            raise ConfigError(
                f"Cannot listen on --uds {path}: {(error.strerror or str(error)).lower()}.",
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
    """Return the TLS context, or None without TLS. Raises ConfigError for invalid files."""
    if config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--ssl-certfile {config.ssl_certfile} with --ssl-keyfile {config.ssl_keyfile} cannot "
            f"be used: {error}.",
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
