"""Commands where standard streams are closed, the disk is full, or the folder is gone."""

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


def surroundings(home: Path) -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("TK_", "XDG_"))
    }
    return kept | {"HOME": str(home)}


def tk(command: str, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command], env=surroundings(home), capture_output=True, text=True, timeout=200, check=False
    )  # fmt: skip


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("command", ["models", "serve --dry-run"])
def test_what_nobody_reads_goes_nowhere(command, closed, tmp_path):
    done = tk(f"{TK} {command} {closed}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert not re.search("fault of tk|Traceback", done.stderr)


@pytest.mark.parametrize("closed", ["<&-", ">&-"])
def test_a_server_without_standard_streams_ends_in_order(closed, tmp_path):
    """Its sockets are not given their descriptors, which the event loop would not close."""
    process = subprocess.Popen(
        ["bash", "-c", f"exec {TK} serve --port 0 --log-format json {closed}"],
        env=surroundings(tmp_path), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "warm-up" in line or "ready in" in line:
                break
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        said = process.stderr.read()
        assert process.wait(60) == 0, said
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("command", ["--help", "config show", "models"])
def test_a_full_disk_is_told_as_such(command, tmp_path):
    done = tk(f"{TK} {command} >/dev/full", tmp_path)
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert "fault" not in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_folder_that_is_gone_has_no_settings(tmp_path):
    done = tk(
        f"mkdir {tmp_path}/gone && cd {tmp_path}/gone && rmdir ../gone && {TK} config show",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
