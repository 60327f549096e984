"""A server that answers as it is told, and a terminal that remembers."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest

from tests.chat.fake_server import FakeServer, running
from toolkit.chat.client import Address, ChatClient, ModelCard
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


class Screen:
    """A terminal whose two streams can be read back."""

    def __init__(self) -> None:
        self.out, self.err = io.StringIO(), io.StringIO()
        self.terminal = Terminal(self.out, self.err)

    @property
    def answers(self) -> str:
        return self.out.getvalue()

    @property
    def talk(self) -> str:
        return self.err.getvalue()


@pytest.fixture
def screen() -> Screen:
    return Screen()


@pytest.fixture
async def connect(server, screen):
    """A function from settings to a session with the fake server."""
    clients = []

    def make(api_key: str | None = None, model: str = "fake", **settings) -> Session:
        client = ChatClient(Address(server.url, api_key))
        clients.append(client)
        return Session(client, ModelCard(model, 100), ChatConfig(**settings), screen.terminal)

    yield make
    for client in clients:
        await client.close()
