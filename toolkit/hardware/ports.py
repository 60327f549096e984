"""TCP ports of this machine."""

import contextlib

import psutil


def bind_failure(error: OSError, port: int) -> str:
    """Return why a port could not be bound, with the process that listens on it, if visible."""
    reason = (error.strerror or str(error)).lower()
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if (
                connection.status == psutil.CONN_LISTEN
                and connection.laddr[1:] == (port,)
                and connection.pid
            ):
                command = " ".join(psutil.Process(connection.pid).cmdline())[:80]
                return f"{reason}, by process {connection.pid} ({command})"
    return reason
