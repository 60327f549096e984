"""Records of servers, without the servers."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from toolkit.running import RunningServer, listed, process_start


@contextlib.contextmanager
def server_of(line: str, folder: Path) -> Iterator[None]:
    """Keep a record with a log if a command line is about running servers."""
    if not re.match(r"tk (ps|stop|logs)\b", line):
        yield
        return
    (folder / "server.log").write_text("ready\n")
    with recorded("http://127.0.0.1:8000", "gpt2", log=str(folder / "server.log")):
        yield


@contextlib.contextmanager
def recorded(url: str, *names: str, **fields: Any) -> Iterator[RunningServer]:
    """Keep the record of a server that is ready. Its process sleeps."""
    process = subprocess.Popen(["sleep", "600"])
    try:
        server = RunningServer(
            pid=process.pid,
            process_start=process_start(process.pid),
            url=url,
            names=names,
            **{
                "model": names[0],
                "host": "127.0.0.1",
                "port": urlsplit(url).port,
                "uds": None,
                "needs_key": False,
                "log": None,
            }
            | fields,
        )
        with listed(server) as set_state:
            set_state("ready")
            yield server
    finally:
        process.kill()
        process.wait()
