"""Choice of the server of a chat."""

from __future__ import annotations

import json
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import hearing
from tests.checkpoints import make_reference
from tests.models.gguf_models import write_model
from tests.records import recorded
from toolkit.chat import local, run
from toolkit.chat.local import LocalServer
from toolkit.cli.commands.chat import require_chat_template
from toolkit.client.wire import ServerError
from toolkit.config.clients import ChatConfig
from toolkit.config.fields import Word
from toolkit.errors import ConfigError, ModelNotFoundError
from toolkit.running import RunningServer, listed


@pytest.fixture
def private(server, monkeypatch):
    """Models of the private servers started; the fake server stands in for each.

    `test_chat_kept` has those that outlive their chat."""
    started = []
    monkeypatch.setattr(run, "can_keep_servers", lambda: False)

    @contextmanager
    def start(model, *, tick, hint, flags):
        started.append(model)
        tick(0.0, "")
        server.api_key = "private"
        yield LocalServer(server.url, server.api_key)

    monkeypatch.setattr(run, "local_server", start)
    return started


def test_server_at_the_default_address_is_used(server, private, screen, monkeypatch):
    monkeypatch.setattr(run, "DEFAULT_URL", server.url)
    server.models[0]["root"] = "../folder"
    for name in (None, "fake", "../folder"):
        with run.find_server(ChatConfig(model=name), screen.terminal) as (address, model):
            assert (address.url, model.name, model.max_context) == (server.url, "fake", 100)
    assert private == []


@pytest.mark.parametrize("model", [None, "fake"])
def test_server_that_starts_is_waited_for(server, private, screen, monkeypatch, model):
    monkeypatch.setattr(run, "DEFAULT_URL", "http://127.0.0.1:1")
    starting = RunningServer(
        model="fake", names=("fake",), url=server.url, host=None, port=1, uds=None, needs_key=False
    )
    with listed(starting) as set_state:
        monkeypatch.setattr(run.time, "sleep", lambda _: set_state("ready"))
        config = ChatConfig(model=model)
        with run.find_server(config, screen.terminal, is_question=True) as (address, _):
            assert address.url == server.url
    assert f"Waiting for fake at {server.url} to start" in screen.stderr
    assert private == []


def test_running_server_is_used_on_any_port(server, private, screen):
    with recorded("http://127.0.0.1:1", "other"):
        for name, tag in (("fake", ""), ("fake", ":latest"), ("unrecorded", "")):
            server.models[0]["id"] = name  # a record has no names of adapters
            config = ChatConfig(model=name + tag)
            with (
                recorded(server.url, "fake"),
                run.find_server(config, screen.terminal) as (address, model),
            ):
                assert (address.url, model.name) == (server.url, name)
        with recorded(server.url, "fake"), pytest.raises(ConfigError, match="2 servers run"):
            run.find_server(ChatConfig(), screen.terminal).__enter__()
    with recorded(server.url, "fake"), run.find_server(ChatConfig(), screen.terminal) as (found, _):
        assert found.url == server.url
    assert private == []


def test_path_is_that_of_the_server_and_no_name(server, private, screen, monkeypatch, tmp_path):
    monkeypatch.setattr(run, "DEFAULT_URL", "http://127.0.0.1:1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fake").mkdir()
    with recorded(server.url, "fake", model=str(tmp_path / "fake")):
        for path in ("fake", "./fake", str(tmp_path / "fake")):
            with run.find_server(ChatConfig(model=path), screen.terminal) as (address, model):
                assert (address.url, model.name) == (server.url, "fake")
    assert private == []
    with (
        recorded(server.url, "fake", model="/elsewhere/fake"),
        run.find_server(ChatConfig(model="fake"), screen.terminal),
    ):
        pass
    assert private == ["fake"]


def test_model_without_a_server_gets_a_private_one(server, private, screen, monkeypatch):
    monkeypatch.setattr(run, "DEFAULT_URL", server.url)
    with run.find_server(ChatConfig(model="m"), screen.terminal) as (address, model):
        assert (address.api_key, model.name) == (server.api_key, "fake")
    assert private == ["m"]
    assert "Starting m" in screen.stderr


def test_private_server_is_started_if_none_runs(private, screen, monkeypatch, unused_tcp_port):
    monkeypatch.setattr(run, "DEFAULT_URL", f"http://127.0.0.1:{unused_tcp_port}")
    with run.find_server(ChatConfig(), screen.terminal) as (_, model):
        assert model.name == "fake"
    assert private == [None]


@pytest.mark.parametrize("is_word", [True, False])
def test_failed_start_of_a_word_hints_at_the_prompt(screen, monkeypatch, unused_tcp_port, is_word):
    monkeypatch.setattr(run, "can_keep_servers", lambda: False)
    monkeypatch.setattr(run, "DEFAULT_URL", f"http://127.0.0.1:{unused_tcp_port}")
    monkeypatch.setattr(local, "start", lambda *_: subprocess.Popen(["false"]))
    model = Word("a/b") if is_word else "a/b"
    with (
        pytest.raises(ServerError, match="did not start") as caught,
        run.find_server(ChatConfig(model=model), screen.terminal),
    ):
        pass
    assert ("--prompt a/b asks a question" in caught.value.message) == is_word


def test_single_word_is_a_question_unless_it_names_a_model(server, screen, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    url = server.url
    models = ("fake", "folder", "tk-demo", "owner/name", "recorded", "missing.gguf")
    with recorded("http://127.0.0.1:1", "recorded"):
        for word in models:
            config = ChatConfig(model=Word(word), url=None if word == "recorded" else url)
            assert run.read_word(config, screen.terminal) is config
        assert screen.stderr == ""
        for word in ("hi", "what?", "x" * 300):
            config = ChatConfig(model=Word(word), url=url)
            read = run.read_word(config, screen.terminal)
            assert (read.model, read.prompt, type(read.prompt)) == (None, word, str)
    assert "'hi' is read as a question: no model, folder or file" in screen.stderr
    flag = ChatConfig(model="hi", url=url)
    assert run.read_word(flag, screen.terminal) is flag


def test_missing_file_is_an_error_before_a_server_starts(private, screen, monkeypatch):
    monkeypatch.setattr(run, "DEFAULT_URL", "http://127.0.0.1:1")
    with (
        pytest.raises(ModelNotFoundError, match=r"There is no file nosuch\.gguf"),
        run.find_server(ChatConfig(model="nosuch.gguf"), screen.terminal),
    ):
        pass
    assert private == []


@pytest.mark.parametrize("key", [None, "wrong"])
@pytest.mark.parametrize("is_question", [False, True])
def test_server_that_rejects_the_key_is_an_error(
    server, private, screen, monkeypatch, key, is_question
):
    """No demo model answers in its place."""
    server.api_key = "secret"
    monkeypatch.setattr(run, "DEFAULT_URL", server.url)
    words = "rejected the API key" if key else "needs an API key"
    for model in (None, "m") if key else (None,):
        with (
            pytest.raises(ServerError, match=words),
            run.find_server(
                ChatConfig(api_key=key, model=model), screen.terminal, is_question=is_question
            ),
        ):
            pass
    assert private == []


def test_model_is_started_next_to_a_server_that_needs_a_key(server, private, screen, monkeypatch):
    server.api_key = "secret"
    monkeypatch.setattr(run, "DEFAULT_URL", server.url)
    with run.find_server(ChatConfig(model="m"), screen.terminal, is_question=True):
        pass
    assert private == ["m"]
    with (
        recorded(server.url, "fake"),
        pytest.raises(ServerError, match=r"needs an API key: --api-key or TK_API_KEY\.$"),
        run.find_server(ChatConfig(model="fake"), screen.terminal),
    ):
        pass
    assert private == ["m"], "one that has the model is not started twice"


def test_demo_model_answers_no_question_that_did_not_ask_for_it(
    private, screen, monkeypatch, unused_tcp_port
):
    monkeypatch.setattr(run, "DEFAULT_URL", f"http://127.0.0.1:{unused_tcp_port}")
    with (
        pytest.raises(ServerError, match=r"No server answers at .*--url, or --model"),
        run.find_server(ChatConfig(), screen.terminal, is_question=True),
    ):
        pass
    assert private == []
    with run.find_server(ChatConfig(model="tk-demo"), screen.terminal, is_question=True):
        pass
    assert private == ["tk-demo"]


def test_url_is_used_and_no_other_server(server, private, screen, unused_tcp_port):
    with run.find_server(ChatConfig(url=server.url, model="unlisted"), screen.terminal) as (
        _,
        model,
    ):
        assert model.name == "unlisted"
    nowhere = ChatConfig(url=f"http://127.0.0.1:{unused_tcp_port}")
    with (
        pytest.raises(ServerError, match="No server answers"),
        run.find_server(nowhere, screen.terminal),
    ):
        pass
    assert private == []


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_model_without_a_template_is_refused_before_it_loads(
    checkpoint, tmp_path, private, screen, monkeypatch, unused_tcp_port, kind
):
    monkeypatch.setattr(run, "DEFAULT_URL", f"http://127.0.0.1:{unused_tcp_port}")
    model = str(shutil.copytree(checkpoint("llama3-gqa"), tmp_path / "base"))
    Path(model, "chat_template.jinja").unlink()
    if kind == "gguf":
        model = str(write_model(tmp_path / "base.gguf", make_reference("llama3-gqa"), "llama"))
    with (
        pytest.raises(ConfigError, match=r"no chat template.*Continue one: tk run"),
        run.find_server(ChatConfig(model=model), screen.terminal, require_chat_template),
    ):
        pass
    assert private == []
    monkeypatch.setenv("TK_CHAT_TEMPLATE", "{{ messages }}")
    with run.find_server(ChatConfig(model=model), screen.terminal, require_chat_template):
        pass
    assert private == [model]


def test_models_with_a_template_may_be_started(checkpoint, tmp_path):
    require_chat_template("tk-demo")
    require_chat_template("no such/model")  # its server says so
    for template in ([{"name": "tool_use", "template": "{{ messages }}"}], "{{ messages }}"):
        folder = shutil.copytree(checkpoint("llama3-gqa"), tmp_path / str(len(template)))
        (folder / "chat_template.jinja").unlink()
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
        require_chat_template(str(folder))
    folder = shutil.copytree(checkpoint("llama3-gqa"), tmp_path / "named")
    (folder / "chat_template.jinja").unlink()
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("{{ messages }}")
    require_chat_template(str(folder))


@pytest.mark.parametrize(
    ("tasks", "words"),
    [(["generate"], "has no chat template"), (["embed"], "does not generate text")],
)
def test_server_that_cannot_chat_is_refused_at_once(server, screen, tasks, words):
    server.models[0] |= {"owned_by": "tk", "tasks": tasks}
    with (
        pytest.raises(ServerError, match=words),
        run.find_server(ChatConfig(url=server.url), screen.terminal),
    ):
        pass


def test_models_that_hear_do_not_chat(tmp_path):
    with pytest.raises(ConfigError, match=r"transcribes sound.*tk transcribe"):
        require_chat_template(str(hearing.save(tmp_path)))
