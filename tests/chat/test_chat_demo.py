"""The chat with a real server and the demo model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.server import Server
from toolkit.chat.commands import handle_line

PROGRAM = "from toolkit.cli import main; main()"


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Iterator[Server]:
    running = Server(cwd=tmp_path_factory.mktemp("server"))
    yield running
    running.stop()


@pytest.fixture
def session(real, screen):
    """With the model as the server describes it."""
    from toolkit.chat.client import Address, ChatClient
    from toolkit.chat.session import Session
    from toolkit.config.clients import ChatConfig

    [card] = Address(real.url).models()
    return Session(
        ChatClient(Address(real.url)), card, ChatConfig(temperature=0.0), screen.terminal
    )


async def test_it_answers_and_counts_what_the_server_counts(real, session, screen):
    await handle_line(session, "What is a KV cache?")
    answer = real.openai().chat.completions.create(
        model="tk-demo",
        messages=[{"role": "user", "content": "What is a KV cache?"}],
        temperature=0.0,
    )
    assert screen.answers == answer.choices[0].message.content + "\n"
    told = re.search(r"in (\d+).* · out (\d+) · context (\d+)/512", screen.talk)
    assert [int(number) for number in told.groups()] == [
        answer.usage.prompt_tokens,
        answer.usage.completion_tokens,
        answer.usage.total_tokens,
    ]
    await session.client.close()


async def test_an_answer_that_was_cut_goes_on_to_the_same_end(session, screen):
    await handle_line(session, "What is a KV cache?")
    whole = session.conversation.answer["content"]
    await handle_line(session, "/set max_tokens 5")
    await handle_line(session, "/retry")
    assert whole.startswith(session.conversation.answer["content"])
    await handle_line(session, "/set max_tokens")
    await handle_line(session, "/continue")
    assert session.conversation.answer["content"] == whole
    await session.client.close()


async def test_a_picture_is_refused_in_one_sentence(session, screen, tmp_path):
    (tmp_path / "dot.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    await handle_line(session, f"/image {tmp_path / 'dot.png'}")
    assert "tk-demo takes no images: " in screen.talk
    assert len(screen.talk.splitlines()) == 1
    await session.client.close()


def test_an_answer_through_a_pipe_fits_its_schema(real, tmp_path):
    schema = {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}}, "required": ["a"]}
    (tmp_path / "schema.json").write_text(json.dumps(schema | {"additionalProperties": False}))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "chat", "--url", real.url, "--schema", "schema.json", "--temperature", "0"],
        input="Is it?", capture_output=True, text=True, timeout=200, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["a"] in ("yes", "no")
