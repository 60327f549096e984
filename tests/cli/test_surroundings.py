"""Commands with closed standard streams, a full disk, or a deleted working folder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TK = f"{sys.executable} -m toolkit"


def environment(home: Path) -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("TK_", "XDG_"))
    }
    return kept | {"HOME": str(home)}


def tk(command: str, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command],
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.parametrize(
    ("command", "closed"),
    [
        ("models", "<&-"),
        ("models", "<&- >&- 2>&-"),
        ("serve --dry-run", ">&-"),
        ("serve --dry-run", "<&- >&- 2>&-"),
    ],
)
def test_command_with_closed_streams_succeeds(command, closed, tmp_path):
    done = tk(f"{TK} {command} {closed}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert not re.search("internal error|Traceback", done.stderr)


def test_server_with_closed_streams_shuts_down_cleanly(tmp_path):
    """Its sockets must not get the streams' descriptors: the event loop would not close them."""
    process = subprocess.Popen(
        ["bash", "-c", f"exec {TK} serve --port 0 --log-format json <&- >&-"],
        env=environment(tmp_path),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "warm-up" in line or "ready in" in line:
                break
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        log = process.stderr.read()
        assert process.wait(60) == 0, log
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("command", ["--help", "config show", "models"])
def test_full_disk_is_reported(command, tmp_path):
    done = tk(f"{TK} {command} >/dev/full", tmp_path)
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert "internal error" not in done.stderr
    assert done.stderr.count("\n") == 1


def test_command_in_a_deleted_folder_finds_no_settings(tmp_path):
    done = tk(
        f"mkdir {tmp_path}/gone && cd {tmp_path}/gone && rmdir ../gone && {TK} config show",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
