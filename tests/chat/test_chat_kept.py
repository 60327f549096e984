"""Private servers that outlive their chat."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.forked import ForkedProcess, ForkServer, stand_in
from tests.records import recorded
from tests.server import until
from toolkit.chat import kept, local
from toolkit.chat.answers.client import Address, ChatClient
from toolkit.chat.kept import can_keep_servers, kept_server
from toolkit.chat.run import find_kept_server, stay_in_use
from toolkit.client.wire import ServerError
from toolkit.config.clients import ChatConfig
from toolkit.demo import MODEL_DIR
from toolkit.errors import ConfigError
from toolkit.running import RunningServer, process_start, running_servers


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The runtime folder: its path is short enough for sockets."""
    folder = tempfile.mkdtemp()
    monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
    yield Path(folder, "tk")
    for server in running_servers():
        os.kill(server.pid, 9)
    shutil.rmtree(folder)


@pytest.mark.usefixtures("runtime")
def test_chats_share_a_private_server_until_it_is_idle(
    tk_here: Callable,
    runtime: Path,
    fork_server: ForkServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Two that start it at the same time start one; it ends by itself."""
    monkeypatch.setenv("TK_API_KEY", "of-another-server")
    monkeypatch.setenv("TK_NUM_THREADS", "1")
    started: list[int] = []

    def start(*arguments: object, **options: object) -> ForkedProcess:
        process = ForkedProcess(fork_server, *arguments, **options)
        started.append(process.pid)
        return process

    monkeypatch.setattr(local, "subprocess", stand_in(start))
    (tmp_path / "model").symlink_to(MODEL_DIR)
    model = str(tmp_path / "model")
    found: list[RunningServer] = []

    def ask() -> None:
        found.append(kept_server(model, 8.0, tick=lambda *_: None))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one.pid for one in found] == started * 2
    (listed,) = json.loads(tk_here("ps", "--json").stdout)
    assert (listed["pid"], listed["model"], listed["idle_timeout"]) == (started[0], model, 8.0)
    assert listed["needs_key"] is False
    assert runtime.stat().st_mode & 0o077 == 0
    assert Path(listed["uds"]).parent == runtime
    monkeypatch.chdir(tmp_path)
    for arguments in (("chat", "model", "What is TTFT?"), ("chat", "What is TTFT?")):
        done = tk_here(*arguments)
        assert (done.returncode, done.stderr) == (0, "")
        assert "time to first token" in done.stdout
    assert "ready in" in tk_here("logs", "model").stdout
    until(lambda: process_start(started[0]) is None)  # a zombie has ended, too
    assert running_servers() == []
    assert [path.suffix for path in runtime.iterdir()] == [".lock"]
    assert found[0].log is not None
    assert "no request for 8 s: the server ends" in Path(found[0].log).read_text()


@pytest.mark.usefixtures("runtime")
def test_private_server_that_fails_or_is_interrupted_leaves_nothing(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(ServerError, match=r"did not start \(exit code 3\)"):
        kept_server("m", 9.0, tick=lambda *_: None, command=["sh", "-c", "exit 3"])

    def interrupt(_: float, line: str) -> None:
        raise KeyboardInterrupt

    processes = []
    start = kept.start
    monkeypatch.setattr(
        kept, "start", lambda *a, **b: processes.append(start(*a, **b)) or processes[0]
    )
    with pytest.raises(KeyboardInterrupt):
        kept_server("m", 9.0, tick=interrupt, command=["sh", "-c", "sleep 60"])
    assert processes[0].poll() is not None
    assert [path.suffix for path in runtime.iterdir()] == [".lock"]


def test_servers_are_not_kept_without_a_private_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "tk").mkdir()
    assert (tmp_path / "tk").chmod(0o777) is None
    assert not can_keep_servers()
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    assert not can_keep_servers()


@pytest.mark.usefixtures("runtime")
def test_demo_model_has_to_be_named(monkeypatch):
    listed = []
    monkeypatch.setattr(Address, "list_models", lambda self: listed.append(self.uds) or ["model"])
    sockets = {"uds": "/tmp/s.sock", "idle_timeout": 300.0}
    with recorded("http://localhost", "tk-demo", **sockets):
        assert find_kept_server(ChatConfig()) is None
        assert find_kept_server(ChatConfig(model="tk-demo")) is not None
        with recorded("http://localhost", "m", **sockets | {"uds": "/tmp/m.sock"}):
            found = find_kept_server(ChatConfig())
            assert found is not None
            assert (found[0].uds, found[0].idle_timeout) == ("/tmp/m.sock", 300.0)
    assert listed == ["/tmp/s.sock", "/tmp/m.sock"]


async def test_an_open_chat_keeps_its_server(server):
    client = ChatClient(Address(server.url, idle_timeout=0.1))
    asked = []
    client.http.event_hooks = {"response": [functools.partial(tick, asked)]}
    using = asyncio.create_task(stay_in_use(client))
    await asyncio.sleep(0.3)
    using.cancel()
    assert len(asked) >= 3
    assert set(asked) == {"/v1/models"}
    await client.close()
    await stay_in_use(ChatClient(Address(server.url)))  # any other server stays by itself


async def tick(asked: list[str], response: httpx.Response) -> None:
    asked.append(response.url.path)


def test_times_to_keep_a_server():
    for text, seconds in (("5m", 300), ("30s", 30), ("1h", 3600), ("0", 0), ("1.5m", 90)):
        assert ChatConfig(keep_alive=text).keep_alive_seconds == seconds
    for text in ("", "5x", "-1", "m"):
        with pytest.raises(ConfigError, match="--keep-alive must be a time"):
            ChatConfig(keep_alive=text)
