"""The listening socket: an address and a port, or a Unix socket. Accepting connections. TLS."""

import asyncio
import contextlib
import logging
import math
import os
import resource
import socket
import ssl
import stat
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager

import psutil

from toolkit.config import ServerConfig
from toolkit.errors import ConfigError
from toolkit.hardware.ports import bind_failure
from toolkit.pem import require_certificate, why_no_key

logger = logging.getLogger(__name__)

BACKLOG = 2048
CONNECTIONS_PER_TURN = 32
RETRY_INTERVAL = 0.002  # seconds until a connection is offered again that was not taken
SPELL = 60.0  # seconds without an event after which the next one is logged again
MAX_FILES = 2**16  # of a process; each is a connection
FEW_FILES = 1024  # fewer are worth a warning
RESERVED_FILES = 16  # for anything but connections, such as pipes to a new engine core
RAISE_LIMIT = "Raise the limit of open files: ulimit -n, or LimitNOFILE in a systemd unit."


def raise_file_limit() -> None:
    """Allow this process as many open files as it may use. Warns if they are few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed < FEW_FILES:
        logger.warning(
            "A process may open only %d files, and each connection is one. %s", allowed, RAISE_LIMIT
        )


def max_connections() -> int:
    """Return the number of connections that the process may open in addition to its open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = MAX_FILES if soft == resource.RLIM_INFINITY else soft
    return max(1, soft - psutil.Process().num_fds() - RESERVED_FILES)


class Spells:
    """Spells of an event that repeats, each of which is logged once."""

    def __init__(self) -> None:
        self._last = -math.inf

    def begins(self) -> bool:
        """Record an event. Returns True for the first of a spell."""
        now = time.monotonic()
        is_first, self._last = now - self._last >= SPELL, now
        return is_first


class Acceptor:
    """Accepts connections of a bound socket. Those that are not taken wait in its backlog."""

    def __init__(self, listener: socket.socket, take: Callable[[socket.socket], bool]) -> None:
        """`take` returns False for a connection that it cannot take now; it is offered again."""
        self._listener, self._take = listener, take
        self._waiting: deque[socket.socket] = deque()  # accepted, but not taken yet
        self._retry: asyncio.TimerHandle | None = None
        self._spells = Spells()
        # Connections inherit the option, so those in TIME_WAIT do not block the port for the next
        # server.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        listener.listen(BACKLOG)
        asyncio.get_running_loop().add_reader(listener, self._accept)

    def offer(self, connections: Iterable[socket.socket]) -> None:
        """Let connections that were taken before be taken again."""
        self._waiting += connections
        if self._retry is None:
            self._accept()

    def close(self) -> None:
        """Close the socket. Connections that wait are refused."""
        asyncio.get_running_loop().remove_reader(self._listener)
        if self._retry is not None:
            self._retry.cancel()
        while self._waiting:
            self._waiting.popleft().close()
        self._listener.close()

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        if self._retry is not None:
            self._retry = None
            loop.add_reader(self._listener, self._accept)
        try:
            for _ in range(CONNECTIONS_PER_TURN + len(self._waiting)):
                if not self._waiting:
                    self._waiting.append(self._listener.accept()[0])
                if not self._take(self._waiting[0]):
                    break
                self._waiting.popleft()
            else:
                return
        except BlockingIOError:
            return
        except OSError as error:  # usually out of file descriptors
            if self._spells.begins():
                logger.warning(
                    "New connections wait: %s. %s", error.strerror or str(error), RAISE_LIMIT
                )
        loop.remove_reader(self._listener)
        self._retry = loop.call_later(RETRY_INTERVAL, self._accept)


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
    assert config.ssl_keyfile is not None, "checked by ServerConfig"
    require_certificate("--ssl-certfile", config.ssl_certfile)
    try:
        # Without a function for the password, OpenSSL asks for it on the terminal.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=lambda: "")
    except OSError as error:  # also ssl.SSLError
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            reason = (
                f"it is not the key of the first certificate in --ssl-certfile "
                f"{config.ssl_certfile}"
            )
        else:
            reason = why_no_key(config.ssl_keyfile)
        raise ConfigError(
            f"--ssl-keyfile {config.ssl_keyfile} cannot be used: {reason}.", param="ssl_keyfile"
        ) from None
    if config.ssl_ca_certs is not None:
        require_certificate("--ssl-ca-certs", config.ssl_ca_certs)
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(config.ssl_ca_certs)
    return context
