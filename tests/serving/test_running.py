"""Records of running servers: tk ps, stop and logs, and servers in the background."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.forked import ForkedProcess, ForkServer, stand_in
from tests.records import recorded
from tests.server import Process, Server, free_port, gone, put_under_load, until
from toolkit.errors import ConfigError
from toolkit.running import (
    MAX_LOGS,
    UNLISTED,
    RunningServer,
    choose,
    listed,
    process_start,
    running_servers,
    runtime_folder,
)
from toolkit.serving import detach

FIRST, SECOND = "http://127.0.0.1:8001", "http://127.0.0.1:9000"


def record(**fields: object) -> RunningServer:
    """Return the record of this process."""
    known = {"model": "m", "names": ("m",), "url": FIRST, "host": "127.0.0.1", "port": 8001}
    return RunningServer(**known | {"uds": None, "needs_key": False} | fields)


# ---- records


def test_a_record_is_private_and_lasts_as_long_as_its_block():
    with listed(record()) as set_state:
        (found,) = running_servers()
        assert (found.pid, found.names, found.state) == (os.getpid(), ("m",), "starting")
        assert runtime_folder().stat().st_mode & 0o777 == 0o700
        assert [path.name for path in runtime_folder().iterdir()] == [f"{os.getpid()}.json"]
        set_state("stopping")
        assert running_servers()[0].state == "stopping"
    assert list(runtime_folder().iterdir()) == []


def test_records_of_ended_processes_are_removed():
    ended = subprocess.Popen(["true"])
    start = process_start(ended.pid)
    until(lambda: process_start(ended.pid) is None)  # a zombie has ended, too
    with listed(record(pid=ended.pid, process_start=start)):
        assert running_servers() == []
        assert list(runtime_folder().iterdir()) == []
    with listed(record(process_start=1.0)):  # another process has its id
        assert running_servers() == []
        assert list(runtime_folder().iterdir()) == []
    ended.wait()


def test_files_that_are_no_records_are_ignored():
    with listed(record()):
        (runtime_folder() / "1.json").write_text('{"pid": 1}')
        (runtime_folder() / "2.json").write_text("{")
        assert len(running_servers()) == 1


def test_a_private_server_has_no_record(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(UNLISTED, "1")
    with listed(record()):
        assert running_servers() == []


@pytest.mark.parametrize("obstacle", ["file", "folder of others"])
def test_a_server_runs_without_a_writable_runtime_folder(obstacle: str, caplog):
    caplog.set_level("INFO")
    if obstacle == "file":
        runtime_folder().touch()
    else:
        runtime_folder().mkdir()
        runtime_folder().chmod(0o777)
    with listed(record()) as set_state:
        set_state("ready")
        assert running_servers() == []
    assert caplog.text.count("tk ps, stop and logs will not find this server") == 1


def test_the_folder_of_another_user_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert runtime_folder() == tmp_path / "tk"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    assert runtime_folder().name == f"tk-run-{os.getuid()}"


def test_a_server_is_chosen_by_name_or_port():
    with pytest.raises(ConfigError, match=r"No server of yours runs"):
        choose(None, "stop")
    with recorded(FIRST, "a", "alias"):
        for word in (None, "a", "alias", "8001"):
            assert choose(word, "stop").url == FIRST
        with pytest.raises(ConfigError, match=r"name, port or process 'b'\. Running: a at http"):
            choose("b", "stop")
        with recorded(SECOND, "a"):
            assert choose("9000", "stop").url == SECOND
            for word in (None, "a"):
                with pytest.raises(ConfigError) as caught:
                    choose(word, "stop")
                assert caught.value.message == (
                    f"2 servers run: a at {FIRST}, a at {SECOND}. Choose one by name, port or "
                    "process: tk stop 8001"
                )


# ---- tk ps, stop and logs


def test_ps_prints_a_table_or_json(tk_here: Callable):
    nothing = tk_here("ps")
    assert (nothing.returncode, nothing.stdout) == (0, "")
    assert nothing.stderr.startswith("No server of yours runs on this machine.")
    assert tk_here("ps", "--json").stdout == "[]\n"
    with recorded(FIRST, "a", "alias", since=time.time() - 7300), recorded(
        SECOND, "b", needs_key=True
    ) as second:  # fmt: skip
        header, *rows = [line.split() for line in tk_here("ps").stdout.splitlines()]
        assert header == ["MODEL", "ADDRESS", "STATE", "UP", "PROCESS", "KEY", "ENDS"]
        assert rows[0][:6] == ["a,", "alias", FIRST, "ready", "2", "h"]
        assert rows[1] == ["b", SECOND, "ready", "0", "s", str(second.pid), "needed", "never"]
        found = json.loads(tk_here("ps", "--json").stdout)
        assert [one["names"] for one in found] == [["a", "alias"], ["b"]]
        assert found[1]["needs_key"] is True


def test_stop_ends_the_server_that_is_named_or_all(tk_here: Callable):
    with recorded(FIRST, "a"), recorded(SECOND, "b"), recorded("http://127.0.0.1:1", "c"):
        assert tk_here("stop").returncode == 2
        assert tk_here("stop", "a", "--all").returncode == 2
        assert len(running_servers()) == 3
        done = tk_here("stop", "9000")
        assert done.stdout.startswith(f"Stopped b at {SECOND} in ")
        assert [one.names for one in running_servers()] == [("a",), ("c",)]
        assert tk_here("stop", "--all").stdout.count("Stopped") == 2
        assert running_servers() == []
    assert tk_here("stop", "--all").returncode == 0


def test_logs_prints_the_file_and_follows_it(tk_here: Callable, tmp_path: Path):
    log = tmp_path / "log"
    log.write_text("first\n")
    with recorded(FIRST, "a"):
        assert "has no log file: it logs to the terminal" in tk_here("logs").stderr
    with recorded(FIRST, "a", log=str(log)) as server:
        assert tk_here("logs", "a").stdout == "first\n"
        os.kill(server.pid, signal.SIGTERM)
        assert tk_here("logs", "-f").stdout in ("first\n", "")  # it may have ended
    with recorded(FIRST, "a", log=str(tmp_path / "missing")):
        assert "cannot be read" in tk_here("logs").stderr


# ---- servers


@pytest.fixture
def tk(tk_here: Callable, tmp_path: Path) -> Iterator[Callable]:
    """Run tk with the runtime folder of the servers of `start`. A failed test leaves no server."""
    yield functools.partial(
        tk_here, XDG_RUNTIME_DIR=str(tmp_path), XDG_STATE_HOME=str(tmp_path / "state")
    )
    for server in running_servers():
        os.kill(server.pid, signal.SIGKILL)


def test_a_server_is_listed_until_stop_has_drained_it(start: Callable[..., Server], tk: Callable):
    server = start("--served-model-name", "tiny", "--api-key", "secret")
    (found,) = json.loads(tk("ps", "--json").stdout)
    assert (found["url"], found["pid"], found["state"]) == (server.url, server.pid, "ready")
    assert (found["names"], found["needs_key"], found["log"]) == (["tiny"], True, None)
    assert "secret" not in json.dumps(found)
    assert tk("stop", "tiny").stdout.startswith(f"Stopped tiny at {server.url} in ")
    assert server.wait() == 0
    assert list(runtime_folder().iterdir()) == []


def test_stop_waits_for_requests_and_a_second_one_ends_them(
    start: Callable[..., Server], tk: Callable
):
    server = start()
    with server.slowly():
        clients = put_under_load(server, 8000)
        server.signal(signal.SIGTERM)
        until(lambda: running_servers()[0].state == "stopping")
        assert tk("stop").stdout.startswith("Stopped ")
    for client in clients:
        client.finish()
    assert server.wait() == 0


def test_a_killed_server_is_no_longer_listed(start: Callable[..., Server], tk: Callable):
    server = start()
    assert len(list(runtime_folder().iterdir())) == 1
    server.signal(signal.SIGKILL)
    server.wait()
    assert tk("ps", "--json").stdout == "[]\n"
    assert list(runtime_folder().iterdir()) == []


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs /proc for its log's name")
def test_a_detached_server_is_ready_and_has_a_log(
    bare_model: Path,
    tk: Callable,
    fork_server: ForkServer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    """Old logs are removed."""
    logs = tmp_path / "state" / "tk" / "servers"
    logs.mkdir(parents=True)
    for number in range(MAX_LOGS + 5):
        (logs / f"2020-01-01-{number:06}-a.log").touch()
    monkeypatch.setattr(
        detach, "subprocess", stand_in(functools.partial(ForkedProcess, fork_server))
    )
    port = str(free_port())
    command = ("serve", str(bare_model), "--detach", "--num-threads", "1", "--port", port)
    done = tk(*command)
    assert done.returncode == 0, done.stderr
    assert done.stderr.index("config") < done.stderr.index("ready in") < done.stderr.index("curl")
    (server,) = running_servers()
    assert (server.state, str(server.port)) == ("ready", port)
    assert f"(process {server.pid}). 'tk stop {port}' ends it" in done.stderr
    failed = tk(*command)
    assert failed.returncode == 2
    assert f"Cannot listen on 127.0.0.1:{port}" in failed.stderr
    log = tk("logs").stdout
    assert "ready in" in log
    assert done.stderr.startswith(log.partition("Try:")[0])
    left = sorted(map(str, logs.iterdir()))
    assert (len(left), left[-1]) == (MAX_LOGS - 1, server.log)  # less that of the failure
    assert tk("stop", port).stdout.startswith("Stopped ")
    os.waitpid(server.pid, 0)
    assert Path(server.log).read_text().endswith("INFO shutting down\n")  # there are no requests
    assert tk("logs").stderr.endswith(
        f"Logs of servers that ran in the background are in {logs}.\n"
    )


@pytest.mark.usefixtures("tk")
def test_ctrl_c_ends_a_detached_server_that_starts(bare_model: Path, tmp_path: Path):
    process = Process("serve", str(bare_model), "--detach", "--port", "0", cwd=tmp_path)
    until(lambda: "config" in process.stderr)
    (server,) = process.children("toolkit")
    process.popen.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert gone(server)
    process.stop()
