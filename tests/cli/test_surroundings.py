"""Commands with closed standard streams, a full disk, or a deleted working folder."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.cli import main

TK = f"{sys.executable} -m toolkit"


def environment(home: Path) -> dict[str, str]:
    """Return the variables of a user. PYTHONUNBUFFERED would hide errors of the last flush."""
    others = ("TK_", "XDG_", "PYTHONUNBUFFERED")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
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
    ("command", "closed"), [("models", "<&- >&- 2>&-"), ("config show", ">&-")]
)
def test_command_with_closed_streams_succeeds(command, closed, tmp_path):
    """`test_run_command` has one without stdin."""
    done = tk(f"{TK} {command} {closed}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert not re.search("internal error|Traceback", done.stderr)


@pytest.mark.parametrize(
    ("arguments", "is_first"),
    [(["serve"], True), (["serve", "--log-format", "json"], False), (["chat"], False)],
)
def test_serve_prints_a_line_before_it_reads_its_settings(monkeypatch, arguments, is_first):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "argv", ["tk", *arguments, "--no-such-flag"])
    with pytest.raises(SystemExit):
        main()
    first, *_ = terminal.getvalue().splitlines()
    assert bool(re.fullmatch(r"tk \S+ is starting \.\.\.", first)) == is_first


def test_server_with_closed_streams_shuts_down_cleanly(tmp_path):
    """Its sockets must not get the streams' descriptors: the event loop would not close them."""
    process = subprocess.Popen(
        ["bash", "-c", f"exec {TK} serve --port 0 --num-threads 1 --log-format json <&- >&-"],
        env=environment(tmp_path),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        is_ready = any('"curl"' in line for line in process.stderr)
        process.send_signal(signal.SIGTERM)
        log = process.stderr.read()
        assert (is_ready, process.wait(60)) == (True, 0), log
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_full_disk_is_reported(tmp_path):
    assert_reports_a_full_disk(tk(f"{TK} --help >/dev/full", tmp_path))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("command", ["config show", "models"])
def test_full_disk_is_reported_by_commands(command, tk_here, monkeypatch):
    full = open("/dev/full", "w")  # noqa: SIM115  # closing it fails
    monkeypatch.setattr(sys, "stdout", full)
    try:
        assert_reports_a_full_disk(tk_here(*command.split()))
    finally:
        with contextlib.suppress(OSError):
            full.close()


def assert_reports_a_full_disk(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert "internal error" not in done.stderr
    assert done.stderr.count("tk: ") == 1
    assert "Exception ignored" not in done.stderr


def test_command_in_a_deleted_folder_finds_no_settings(tmp_path, tk_here, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    done = tk_here("config", "show")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("# no tk.toml\n")
