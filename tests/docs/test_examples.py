"""The examples of the manual do what they say, against a server that runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.serving import Server
from toolkit.docs.prose import PROSE

NEEDS_MORE = ("gpt2", "./model", "tk serve", "--rps 50")
"""What an example needs that is not here: the hub, somebody's model, a server that nobody stops, or a fast one."""
EXAMPLES = [
    line
    for prose in PROSE.values()
    for _, lines in prose.examples
    for line in lines.split("\n")
    if not any(part in line for part in NEEDS_MORE)
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It serves the demo model."""
    running = Server(cwd=tmp_path_factory.mktemp("server"))
    yield running
    running.stop()


@pytest.mark.parametrize("line", EXAMPLES)
def test_it_runs(line: str, server: Server, tmp_path: Path):
    tk = tmp_path / "bin" / "tk"
    tk.parent.mkdir()
    tk.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m toolkit "$@"\n')
    tk.chmod(0o755)
    environment = {"PATH": f"{tk.parent}:{os.environ['PATH']}", "HOME": str(tmp_path), "TK_URL": server.url}
    done = subprocess.run(
        ["bash", "-c", line.replace("http://127.0.0.1:8000", server.url).replace("127.0.0.1:8000", server.url)],
        input="What is a KV cache?", env=os.environ | environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    slow_machine = "bench" in line and done.returncode == 1 and "SATURATED" in done.stdout + done.stderr
    assert done.returncode == 0 or slow_machine, done.stderr
    assert done.stdout or "source" in line
