"""Which server a chat talks to when none is named."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from toolkit.chat import run
from toolkit.chat.local import LocalServer
from toolkit.client.wire import ServerError
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


def test_the_server_that_runs_here_is_used(server, private, screen, monkeypatch):
    monkeypatch.setattr(run, "DEFAULT_URL", server.url)
    for model in (None, "fake"):
        with run.serving(ChatConfig(model=model), screen.terminal) as (address, card):
            assert (address.url, card.name, card.max_context) == (server.url, "fake", 100)
    assert private == []


def test_a_model_that_is_not_served_here_gets_a_private_server(
    server, private, screen, monkeypatch
):
    monkeypatch.setattr(run, "DEFAULT_URL", server.url)
    with run.serving(ChatConfig(model="m"), screen.terminal) as (address, card):
        assert (address.api_key, card.name) == (server.api_key, "fake")
    assert private == ["m"]
    assert "Starting m" in screen.talk


def test_where_none_runs_a_private_one_is_started(private, screen, monkeypatch, unused_tcp_port):
    monkeypatch.setattr(run, "DEFAULT_URL", f"http://127.0.0.1:{unused_tcp_port}")
    with run.serving(ChatConfig(), screen.terminal) as (_, card):
        assert card.name == "fake"
    assert private == [None]


def test_a_server_whose_key_is_missing_is_named_and_not_used(server, private, screen, monkeypatch):
    server.api_key = "secret"
    monkeypatch.setattr(run, "DEFAULT_URL", server.url)
    with run.serving(ChatConfig(), screen.terminal):
        pass
    assert "wants another API key" in screen.talk
    assert private == [None]


def test_a_url_is_used_and_no_other(server, private, screen, unused_tcp_port):
    with run.serving(ChatConfig(url=server.url, model="unlisted"), screen.terminal) as (_, card):
        assert card.name == "unlisted"
    nowhere = ChatConfig(url=f"http://127.0.0.1:{unused_tcp_port}")
    with (
        pytest.raises(ServerError, match="No server answers"),
        run.serving(nowhere, screen.terminal),
    ):
        pass
    assert private == []


def test_what_has_spaces_is_a_question_and_no_model():
    assert (ChatConfig(model="review this").model, ChatConfig(model="review this").prompt) == (
        None,
        "review this",
    )
    assert (ChatConfig(model="gpt2").model, ChatConfig(model="gpt2").prompt) == ("gpt2", None)
    assert ChatConfig(model="gpt2", prompt="a b").model == "gpt2"
