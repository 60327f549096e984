"""Internal errors: one paragraph on stderr, and a traceback in a file of bounded size."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from toolkit import logs
from toolkit.cli import root
from toolkit.errors import ConfigError
from toolkit.inventory import listing
from toolkit.logs import LogStyle, save_traceback


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    return tmp_path


@pytest.fixture
def broken_tk(
    home: Path, tk_here: Callable, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs `tk models` with an error in it."""

    def run(error: BaseException, **environment: str) -> subprocess.CompletedProcess[str]:
        def list_models(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(listing, "list_models", list_models)
        return tk_here("models", **environment)

    return run


def test_internal_error_message_has_the_path_of_the_traceback(home, broken_tk):
    done = broken_tk(ZeroDivisionError("by zero"))
    log = home / ".local/state/tk/errors.log"
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert "ZeroDivisionError: by zero" in done.stderr
    assert str(log) in done.stderr
    assert "Traceback" not in done.stderr
    kept = log.read_text()
    assert "Traceback (most recent call last):" in kept
    assert "in list_models" in kept
    assert log.stat().st_mode & 0o077 == 0
    other = broken_tk(KeyError("again"), XDG_STATE_HOME=str(home / "state"))
    assert str(home / "state/tk/errors.log") in other.stderr


@pytest.mark.parametrize(("value", "shown"), [("1", True), ("0", False), ("", False)])
def test_tk_debug_shows_the_traceback(broken_tk, value, shown):
    done = broken_tk(ZeroDivisionError("by zero"), TK_DEBUG=value)
    assert done.returncode == 1
    assert ("Traceback" in done.stderr) == shown
    assert "internal error" in done.stderr


def test_ctrl_c_before_a_command_starts_exits_with_130(broken_tk, tk_here, monkeypatch):
    done = broken_tk(KeyboardInterrupt())
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(root, "tree", interrupted)
    early = tk_here("models")
    assert (early.returncode, early.stderr) == (130, "")


def test_usage_error_has_no_traceback_without_tk_debug(home, broken_tk):
    done = broken_tk(ConfigError("not so"))
    assert (done.returncode, done.stderr) == (2, "tk: not so\n")
    assert not (home / ".local").exists()
    debugged = broken_tk(ConfigError("not so"), TK_DEBUG="1")
    assert debugged.returncode == 2
    assert "Traceback" in debugged.stderr


def test_internal_error_without_a_writable_log(home, broken_tk):
    (home / ".local").write_text("a file where a folder should be")
    done = broken_tk(ZeroDivisionError("by zero"))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "TK_DEBUG=1 shows its traceback" in done.stderr


def test_error_log_size_is_bounded(home, monkeypatch):
    monkeypatch.setattr(logs, "MAX_LOG_BYTES", 5000)
    for number in range(100):
        save_traceback(ValueError(f"number {number}"))
    folder = home / ".local/state/tk"
    assert {path.name for path in folder.iterdir()} == {"errors.log", "errors.log.1"}
    assert all(path.stat().st_size < 2 * 5000 for path in folder.iterdir())
    assert "number 99" in (folder / "errors.log").read_text()


def logged(
    style: LogStyle, capsys: pytest.CaptureFixture[str], message: str = "no such thing"
) -> str:
    """Return a server's log of an exception."""
    root = logging.getLogger()
    before, root.handlers = root.handlers, []
    try:
        style.apply()
        try:
            raise OSError(message)
        except OSError:
            logging.getLogger("toolkit.test").exception("request 7 failed")
    finally:
        root.handlers = before
    return capsys.readouterr().err


def test_text_log_has_one_line_for_an_exception(home, capsys, monkeypatch):
    line = logged(LogStyle("info"), capsys)
    assert line.count("\n") == 1
    assert "request 7 failed (OSError: no such thing. Its traceback is in " in line
    assert "no such thing" in (home / ".local/state/tk/errors.log").read_text()
    monkeypatch.setenv("TK_DEBUG", "1")
    assert "Traceback" in logged(LogStyle("info"), capsys)


def test_json_log_has_the_traceback_in_a_field(home, capsys):
    line = logged(LogStyle("info", json=True), capsys)
    assert line.count("\n") == 1
    assert "Traceback" in line


@pytest.mark.parametrize("debug", ["", "1"])
@pytest.mark.parametrize("json", [False, True])
def test_log_escapes_the_text_of_an_error(home, capsys, monkeypatch, json, debug):
    monkeypatch.setenv("TK_DEBUG", debug)
    line = logged(LogStyle("info", json=json), capsys, "\x1b[2J\x9b\u202e")
    assert not set("\x1b\x9b\u202e") & set(line)
    assert r"\u202e" in line
