"""Runs `tk serve` for a benchmark."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import httpx

from toolkit.chat.local import free_port

POLL = 0.02  # seconds


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A ready server."""

    client: httpx.Client
    pid: int
    ready: float  # seconds from the command to the first 200 of /readyz


@contextmanager
def run_server(
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    log: IO[bytes] | int = subprocess.DEVNULL,
) -> Iterator[ServerProcess]:
    """Run `tk serve ARGUMENTS` on a free local port, and send SIGTERM at the end of the block.

    `environment` is added to this process's. `log` gets stdout and stderr. Raises SystemExit if the
    server ends before it is ready."""
    port = free_port()
    start = time.monotonic()
    command = [sys.executable, "-m", "toolkit", "serve", *arguments]
    server = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env={**os.environ, **(environment or {})},
    )
    try:
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=300, trust_env=False
        ) as client:
            _wait_until_ready(client, server)
            yield ServerProcess(client, server.pid, time.monotonic() - start)
    finally:
        server.terminate()
        server.wait()


def _wait_until_ready(client: httpx.Client, server: subprocess.Popen[Any]) -> None:
    while True:
        if server.poll() is not None:
            raise SystemExit(f"tk serve ended with exit code {server.returncode}.")
        try:
            if client.get("/readyz").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(POLL)
