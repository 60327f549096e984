"""Choice of a running server for clients without --url."""

from __future__ import annotations

import io
import sys

import pytest

from tests.chat.fake_server import FakeServer, running
from tests.records import recorded
from toolkit.cli.commands.bench import with_url
from toolkit.cli.values import values
from toolkit.client.choice import choose_server, choose_urls, ready_servers
from toolkit.config.clients import DEFAULT_URL, TopConfig
from toolkit.config.load import BenchConfig, SweepConfig
from toolkit.errors import ConfigError
from toolkit.top.run import open_sources

FIRST, SECOND = "http://127.0.0.1:8001", "http://127.0.0.1:9000"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def at_terminal(monkeypatch: pytest.MonkeyPatch):
    """Function that types lines."""

    def type_lines(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", Terminal(text))
        monkeypatch.setattr(sys, "stderr", Terminal())

    return type_lines


def top_urls(*urls: str) -> list[str]:
    return [source.url for source in open_sources(TopConfig(url=urls))]


def test_without_a_record_clients_use_the_default_address():
    assert choose_server() is None
    assert with_url(BenchConfig()).url == DEFAULT_URL
    assert top_urls() == [DEFAULT_URL]


def test_clients_find_the_only_server_on_any_port():
    with recorded(SECOND, "a"):
        assert with_url(BenchConfig()).url == SECOND
        assert with_url(SweepConfig(vary=("rps=1",))).vary == ("rps=1",)
        assert top_urls() == [SECOND]
        assert with_url(BenchConfig(url=FIRST)).url == FIRST
        assert top_urls(FIRST) == [FIRST]


def test_servers_that_clients_cannot_reach_are_not_chosen():
    with recorded("http://localhost", "a", uds="/tmp/socket"):
        assert ready_servers() == []


def test_model_chooses_among_several_servers():
    with recorded(FIRST, "a", "alias", model="./folder"), recorded(SECOND, "b"):
        for model in ("a", "alias", "./folder"):
            assert choose_server(model).url == FIRST
        assert with_url(BenchConfig(model="b")).url == SECOND


def test_several_servers_without_a_terminal_are_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("1\n"))
    with recorded(FIRST, "a"), recorded(SECOND, "b"):
        for choose in (choose_server, choose_urls):
            with pytest.raises(ConfigError) as caught:
                choose()
            assert caught.value.message == (
                f"2 servers run: a at {FIRST}, b at {SECOND}. Choose with --url, such as --url "
                f"{FIRST}"
            )


def test_a_terminal_is_asked_which_of_several_servers(at_terminal):
    with recorded(FIRST, "a"), recorded(SECOND, "b"):
        at_terminal("3\n\nx\n2\n")
        assert choose_server().url == SECOND
        assert sys.stderr.getvalue().startswith(f"1  a at {FIRST}\n2  b at {SECOND}\nWhich")
        assert sys.stderr.getvalue().count("Which server? [1-2] ") == 4
        at_terminal("1\n")
        assert choose_urls() == (FIRST,)
        at_terminal("\n")
        assert choose_urls() == (FIRST, SECOND)
        at_terminal("")
        with pytest.raises(ConfigError, match="Choose with --url"):
            choose_server()


def test_completions_list_the_models_of_running_servers():
    with running(FakeServer()) as server, recorded(server.url, "served", "alias"):
        server.models[0]["id"] = "listed"
        assert values("NAME", ()) == ["listed"]
        assert values("SERVER", ()) == ["served", "alias"]
