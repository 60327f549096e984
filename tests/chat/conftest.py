"""Fixtures: a scripted chat server, and a terminal whose output can be read back."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest

from tests.chat.fake_server import FakeServer, running
from tests.local import LocalServer
from tests.server import Server
from toolkit.chat.answers.client import Address, ChatClient, ModelInfo
from toolkit.chat.screen.terminal import Terminal
from toolkit.chat.session import Session
from toolkit.config.clients import ChatConfig


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running(FakeServer()) as fake:
        yield fake


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Iterator[Server]:
    """A server with the demo model."""
    served = LocalServer(cwd=tmp_path_factory.mktemp("server"))
    yield served
    served.stop()


class Screen:
    """A terminal with stdout and stderr in memory."""

    def __init__(self) -> None:
        self.out, self.err = io.StringIO(), io.StringIO()
        self.terminal = Terminal(self.out, self.err)

    @property
    def stdout(self) -> str:
        return self.out.getvalue()

    @property
    def stderr(self) -> str:
        return self.err.getvalue()


@pytest.fixture
def screen() -> Screen:
    return Screen()


@pytest.fixture
async def connect(server, screen):
    """Function that makes a session with the fake server from settings."""
    clients = []

    def make(api_key: str | None = None, model: str = "fake", **settings) -> Session:
        client = ChatClient(Address(server.url, api_key))
        clients.append(client)
        return Session(client, ModelInfo(model, 100), ChatConfig(**settings), screen.terminal)

    yield make
    for client in clients:
        await client.close()
