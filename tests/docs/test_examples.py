"""The examples of the manual do what they say, against a server that runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.serving import Server
from tests.hub import Hub
from toolkit.demo import MODEL_DIR
from toolkit.docs.prose import PROSE

HUB = ("tk pull", "tk show", "tk rm", "--dry-run")
"""Examples with these find models here: gpt2 on a hub of this machine, and one in ./model."""
NEEDS_MORE = (
    "gpt2", "./model", "tk serve", "--rps 50", "--find-max-rps", "trace.jsonl", "before.json",
)  # fmt: skip
"""What others need that is not here: a model's weights, a server that nobody stops, a fast one, a minute."""
EXAMPLES = [
    line
    for prose in PROSE.values()
    for _, lines in prose.examples
    for line in lines.split("\n")
    if any(part in line for part in HUB) or not any(part in line for part in NEEDS_MORE)
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It serves the demo model."""
    running = Server(cwd=tmp_path_factory.mktemp("server"))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    """It has the demo model, as gpt2."""
    hub = Hub()
    hub.add("gpt2", Path(MODEL_DIR))
    yield hub
    hub.close()


@pytest.mark.parametrize("line", EXAMPLES)
def test_it_runs(line: str, server: Server, hub: Hub, tmp_path: Path):
    tk = tmp_path / "bin" / "tk"
    tk.parent.mkdir()
    tk.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m toolkit "$@"\n')
    tk.chmod(0o755)
    (tmp_path / "model").symlink_to(MODEL_DIR)
    (tmp_path / "models").mkdir()
    environment = {"PATH": f"{tk.parent}:{os.environ['PATH']}", "HOME": str(tmp_path), "TK_URL": server.url}
    if any(part in line for part in HUB):
        environment |= {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")}
    if "tk rm" in line:
        line = f"tk pull gpt2 && {line}"
    done = subprocess.run(
        ["bash", "-c", line.replace("http://127.0.0.1:8000", server.url).replace("127.0.0.1:8000", server.url)],
        input="What is a KV cache?", cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    slow_machine = "bench" in line and done.returncode == 1 and "SATURATED" in done.stdout + done.stderr
    assert done.returncode == 0 or slow_machine, done.stderr
    assert done.stdout or "source" in line
