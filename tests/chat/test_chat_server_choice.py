"""Which server a chat talks to when none is named."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from toolkit.bench.wire import ServerError
from toolkit.chat import run
from toolkit.chat.local import LocalServer
from toolkit.config.clients import ChatConfig


@pytest.fixture
def private(server, monkeypatch):
    """Models that private servers were asked for; each is the fake server."""
    started = []

    @contextmanager
    def start(model, *, tick):
        started.append(model)
        tick(0.0)
        server.api_key = "of the private one"
        yield LocalServer(server.url, server.api_key)

    monkeypatch.setattr(run, "local_server", start)
    return started


def test_the_server_that_runs_here_is_used_and_named(server, private, screen, monkeypatch):
    monkeypatch.setattr(run, "DEFAULT_URL", server.url)
    with run.connected(ChatConfig(), screen.terminal) as client:
        assert (client.url, client.model) == (server.url, "fake")
    assert f"Using the server that runs at {server.url}." in screen.talk
    assert private == []


def test_a_named_model_gets_a_private_server(server, private, screen, monkeypatch):
    monkeypatch.setattr(run, "DEFAULT_URL", server.url)
    with run.connected(ChatConfig(model="m"), screen.terminal) as client:
        assert client.model == "fake"
    assert private == ["m"]
    assert "Starting m" in screen.talk


def test_where_none_runs_a_private_one_is_started(private, screen, monkeypatch, unused_tcp_port):
    monkeypatch.setattr(run, "DEFAULT_URL", f"http://127.0.0.1:{unused_tcp_port}")
    with run.connected(ChatConfig(), screen.terminal) as client:
        assert client.first_model() == "fake"
    assert private == [None]


def test_a_server_whose_key_is_missing_is_named_and_not_used(server, private, screen, monkeypatch):
    server.api_key = "secret"
    monkeypatch.setattr(run, "DEFAULT_URL", server.url)
    with run.connected(ChatConfig(), screen.terminal):
        pass
    assert "wants another API key" in screen.talk
    assert private == [None]


def test_a_url_is_used_and_no_other(server, private, screen, unused_tcp_port):
    with run.connected(ChatConfig(url=server.url), screen.terminal) as client:
        assert client.model == "fake"
    nowhere = ChatConfig(url=f"http://127.0.0.1:{unused_tcp_port}")
    with pytest.raises(ServerError, match="No server answers"), run.connected(nowhere, screen.terminal):
        pass
    assert private == []
