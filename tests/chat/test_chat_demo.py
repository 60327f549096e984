"""Chat with a real server and the demo model."""

from __future__ import annotations

import json
import re

import pytest

from toolkit.chat.commands import handle_line


@pytest.fixture
def session(real, screen):
    """Session with the model that the server lists."""
    from toolkit.chat.answers.client import Address, ChatClient
    from toolkit.chat.session import Session
    from toolkit.config.clients import ChatConfig

    [model] = Address(real.url).list_models()
    return Session(
        ChatClient(Address(real.url)), model, ChatConfig(temperature=0.0), screen.terminal
    )


async def test_answer_and_token_counts_are_the_servers(real, session, screen):
    await handle_line(session, "What is a KV cache?")
    answer = real.openai().chat.completions.create(
        model="tk-demo",
        messages=[{"role": "user", "content": "What is a KV cache?"}],
        temperature=0.0,
    )
    assert screen.stdout == answer.choices[0].message.content + "\n"
    counts = re.search(r"in (\d+).* · out (\d+) · context (\d+)/512", screen.stderr)
    assert [int(number) for number in counts.groups()] == [
        answer.usage.prompt_tokens,
        answer.usage.completion_tokens,
        answer.usage.total_tokens,
    ]
    await session.client.close()


async def test_continue_completes_a_cut_answer(session, screen):
    await handle_line(session, "What is a KV cache?")
    complete = session.conversation.last_message["content"]
    await handle_line(session, "/set max_tokens 5")
    await handle_line(session, "/retry")
    assert complete.startswith(session.conversation.last_message["content"])
    await handle_line(session, "/set max_tokens")
    await handle_line(session, "/continue")
    assert session.conversation.last_message["content"] == complete
    await session.client.close()


async def test_image_is_refused_in_one_line(session, screen, tmp_path):
    (tmp_path / "dot.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    await handle_line(session, f"/image {tmp_path / 'dot.png'}")
    assert "tk-demo accepts no images: " in screen.stderr
    assert len(screen.stderr.splitlines()) == 1
    await session.client.close()


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "tide"}}])
def test_agent_calls_a_tool_and_reads_its_result(real, choice):
    place = {"type": "object", "properties": {"place": {"enum": ["Brest", "Cadiz"]}}}
    place |= {"required": ["place"], "additionalProperties": False}
    functions = [{"name": "tide", "parameters": place}, {"name": "moon"}]
    tools = [{"type": "function", "function": one} for one in functions]
    messages = [{"role": "user", "content": "When is the tide in Brest?"}]

    def ask(choice):
        with real.openai() as client:
            answer = client.chat.completions.create(
                model="tk-demo", messages=messages, tools=tools, tool_choice=choice
            )
        messages.append(answer.choices[0].message)
        return messages[-1]

    for call in ask(choice).tool_calls:
        assert json.loads(call.function.arguments).get("place", "Brest") in ("Brest", "Cadiz")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "at noon"})
    assert len(messages) > 2
    assert ask("auto").content


SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"enum": ["yes", "no"]},
        "b": {"type": "boolean"},
        "c": {"type": "object", "properties": {"d": {"type": "null"}}},
    },
    "required": ["a", "b"],
}


@pytest.mark.parametrize("question", ["What is a token?", "Who are you?", "Count."])
def test_answer_under_a_schema_ends_soon(real, question):
    """The model was not trained for it. Neither line breaks nor unnamed properties go on."""
    strict = {"name": "x", "schema": SCHEMA, "strict": True}
    body = {
        "messages": [{"role": "user", "content": question}],
        "response_format": {"type": "json_schema", "json_schema": strict},
        "max_tokens": 80,
        "temperature": 0,
    }
    [choice] = real.http.post("/v1/chat/completions", json=body).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert {"a", "b"} <= json.loads(choice["message"]["content"]).keys() <= {"a", "b", "c"}


def test_piped_answer_matches_its_schema(real, tk_here, tmp_path):
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    flags = ["--url", real.url, "--schema", "schema.json", "--temperature", "0"]
    done = tk_here("chat", *flags, stdin="Is it?", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["a"] in ("yes", "no")
