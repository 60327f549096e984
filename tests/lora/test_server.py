"""Adapters as models of the server."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest

from tests import checkpoints
from tests.local import LocalServer
from tests.lora.conftest import Adapter
from tests.server import Server

COUNT = 12
TEXT = "The sea is"


@pytest.fixture(scope="module")
def mine(adapter) -> Adapter:
    return adapter("attention")


@pytest.fixture(scope="module")
def server(mine, checkpoint, tmp_path_factory) -> Iterator[Server]:
    cwd = tmp_path_factory.mktemp("server")
    model = str(checkpoint(mine.base))
    arguments = ("--served-model-name", "base", "--dtype", "float32", "--pooling", "mean")
    server = LocalServer(model, *arguments, "--lora-modules", f"mine={mine.folder}", cwd=cwd)
    yield server
    server.stop()


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with server.openai() as client:
        yield client


def text(model, prompt: str = TEXT) -> str:
    """Return Transformers' answer."""
    tokenizer = checkpoints.make_tokenizer()
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    return tokenizer.decode(checkpoints.greedy(model, ids, COUNT), skip_special_tokens=True)


def test_model_of_a_request_chooses_the_adapter(client, mine):
    answers = {}
    for name in ("base", "mine"):
        answer = client.completions.create(
            model=name,
            prompt=TEXT,
            max_tokens=COUNT,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        assert answer.model == name
        answers[name] = answer.choices[0].text
    assert answers["mine"] == text(mine.model)
    assert answers["base"] == text(checkpoints.make_reference(mine.base))


def test_conversations_and_beams_have_adapters(client, mine):
    messages = [{"role": "user", "content": TEXT}]
    options = {"messages": messages, "max_tokens": COUNT, "temperature": 0}
    prompt = checkpoints.make_tokenizer().apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    stream = client.chat.completions.create(
        model="mine", stream=True, extra_body={"ignore_eos": True}, **options
    )
    chunks = list(stream)
    assert {chunk.model for chunk in chunks} == {"mine"}
    given = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert given == text(mine.model, prompt)
    beams = {
        name: client.completions.create(
            model=name,
            prompt=TEXT,
            max_tokens=4,
            extra_body={"use_beam_search": True, "best_of": 2, "ignore_eos": True},
        )
        .choices[0]
        .text
        for name in ("base", "mine")
    }
    assert beams["base"] != beams["mine"]


def test_adapters_are_listed_with_their_parent(client, mine):
    cards = {card.id: card.model_dump() for card in client.models.list()}
    assert cards.keys() == {"base", "mine"}
    assert (cards["mine"]["parent"], cards["base"]["parent"]) == ("base", None)
    assert cards["mine"]["root"] == str(mine.folder)
    assert client.models.retrieve("mine").model_dump()["parent"] == "base"


def test_other_names_are_refused(client):
    with pytest.raises(openai.NotFoundError, match="Served: 'base', 'mine'"):
        client.completions.create(model="other", prompt=TEXT)
    with pytest.raises(openai.BadRequestError, match=r"adapters do not pool\. Use 'base'"):
        client.embeddings.create(model="mine", input=TEXT)


def test_an_adapter_cannot_have_the_model_s_name(tk_here, checkpoint, mine):
    model = str(checkpoint(mine.base))
    flags = ("--served-model-name", "twice", "--lora-modules", f"twice={mine.folder}")
    done = tk_here("serve", model, "--port", "0", *flags)
    assert done.returncode == 2
    assert "the model is called 'twice', too" in done.stderr


def test_an_adapter_for_another_base_model_is_refused(tk_here, checkpoint, mine):
    module = json.dumps({"name": "a", "path": str(mine.folder), "base_model_name": "other"})
    model = str(checkpoint(mine.base))
    done = tk_here("serve", model, "--port", "0", "--lora-modules", module)
    assert done.returncode == 2
    assert "base_model_name is 'other'" in done.stderr
