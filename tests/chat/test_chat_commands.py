"""What begins with a slash."""

from __future__ import annotations

import base64
import re

import orjson
import pytest
from openai.types.chat import ChatCompletionContentPartParam
from pydantic import TypeAdapter

from tests.chat.fake_server import said
from toolkit.chat import commands, store
from toolkit.chat.client import Address, ModelCard
from toolkit.chat.commands import handle_line
from toolkit.chat.images import MOST_BYTES, PIXEL


def kept(session):
    return said({"messages": session.conversation.messages})


async def test_retry_takes_the_place_of_the_last_answer(server, connect):
    session = connect()
    await handle_line(session, "One")
    await handle_line(session, "Two")
    server.pieces = ["Better."]
    await handle_line(session, "/retry")
    assert said(server.bodies[2]) == said(server.bodies[1])
    assert kept(session)[-2:] == [("user", "Two"), ("assistant", "Better.")]


@pytest.mark.parametrize("line", ["/retry", "/edit"])
async def test_a_retry_or_edit_in_vain_keeps_the_old_answer(server, connect, screen, line):
    session = connect()
    await handle_line(session, "One")
    session.card = ModelCard("gone")
    for _ in range(2):
        await handle_line(session, line)
        if line == "/edit":
            await handle_line(session, "Another")
    assert "No model gone" in screen.talk
    assert kept(session) == [("user", "One"), ("assistant", "Hello, wörld.")]


async def test_edit_offers_the_last_question_and_asks_it_in_the_old_ones_place(server, connect):
    session = connect()
    await handle_line(session, "One")
    await handle_line(session, "Two")
    await handle_line(session, "/edit")
    assert session.draft == "Two"
    await handle_line(session, "Three")
    assert [content for _, content in said(server.bodies[-1])] == ["One", "Hello, wörld.", "Three"]
    assert [content for _, content in kept(session)] == [
        "One",
        "Hello, wörld.",
        "Three",
        "Hello, wörld.",
    ]
    await handle_line(session, "Four")
    assert len(kept(session)) == 6


async def test_edit_with_a_form_that_cannot_be_read_loses_nothing(server, connect, screen):
    session = connect()
    await handle_line(session, "One")
    await handle_line(session, "/set schema /missing.json")
    await handle_line(session, "/edit")
    await handle_line(session, "Two")
    assert "cannot read" in screen.talk
    assert kept(session) == [("user", "One"), ("assistant", "Hello, wörld.")]


async def test_edit_comes_before_the_result_of_a_tool(server, connect):
    server.pieces = [
        {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}]}
    ]
    session = connect()
    await handle_line(session, "One")
    assert session.open_call is not None
    server.pieces = ["Fine."]
    await handle_line(session, "/edit")
    assert session.open_call is None
    await handle_line(session, "Two")
    assert kept(session) == [("user", "Two"), ("assistant", "Fine.")]


async def test_undo_takes_question_and_answer_back(server, connect, screen):
    session = connect()
    await handle_line(session, "/undo")
    assert "Nothing has been asked yet" in screen.talk
    await handle_line(session, "One")
    await handle_line(session, "Two")
    await handle_line(session, "/undo")
    assert "Taken back: Two" in screen.talk
    assert kept(session) == [("user", "One"), ("assistant", "Hello, wörld.")]


async def test_continue_lets_the_last_answer_go_on(server, connect, screen):
    session = connect()
    await handle_line(session, "/continue")
    assert "There is no answer to continue." in screen.talk
    server.finish_reason = "length"
    await handle_line(session, "Hi")
    assert "/continue goes on" in screen.talk
    server.pieces = [" And", " more."]
    await handle_line(session, "/continue")
    body = server.bodies[-1]
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert said(body)[-1] == ("assistant", "Hello, wörld.")
    assert kept(session) == [("user", "Hi"), ("assistant", "Hello, wörld. And more.")]


async def test_settings_are_shown_changed_checked_and_taken_back(server, connect, screen):
    session = connect(temperature=0.3)
    await handle_line(session, "/set temperature 1.5")
    await handle_line(session, "/set max-tokens 7")
    await handle_line(session, "Hi")
    assert (server.bodies[-1]["temperature"], server.bodies[-1]["max_tokens"]) == (1.5, 7)
    await handle_line(session, "/set temperature")
    await handle_line(session, "Hi")
    assert "temperature" not in server.bodies[-1]
    for line, message in (
        ("/set temperature 9", "/set temperature is at most 2"),
        ("/set temprature 1", "Did you mean temperature?"),
        ("/set reasoning loud", "is one of short, full, hidden"),
    ):
        await handle_line(session, line)
        assert message in screen.talk
    await handle_line(session, "/show")
    assert re.search(r"max_tokens\s+7", screen.talk)
    assert re.search(r"context\s+100 tokens", screen.talk)


async def test_the_model_changes_to_one_that_the_server_lists(server, connect, screen):
    server.models.append({"id": "other/model", "context_length": 5})
    session = connect()
    await handle_line(session, "/model")
    assert "* fake" in screen.talk
    await handle_line(session, "/model other/modle")
    assert "Did you mean other/model?" in screen.talk
    await handle_line(session, "/model other/model")
    await handle_line(session, "Hi")
    assert server.bodies[-1]["model"] == "other/model"
    assert "context 47/5 " in screen.talk


async def test_the_system_message_and_a_new_conversation(server, connect, screen):
    session = connect()
    await handle_line(session, "/system")
    assert "There is no system message" in screen.talk
    await handle_line(session, "Hi")
    await handle_line(session, "/system Be brief.")
    await handle_line(session, "/clear")
    await handle_line(session, "Hi")
    assert said(server.bodies[-1]) == [("system", "Be brief."), ("user", "Hi")]


async def test_conversations_are_saved_for_their_owner_alone_and_go_on(server, connect, screen):
    first = connect(system="Be kind.")
    server.pieces = [{"reasoning_content": "Hm."}, "Hello."]
    await handle_line(first, "What is a KV cache?")
    assert first.path.stat().st_mode & 0o077 == 0
    assert orjson.loads(first.path.read_bytes())["messages"][1]["reasoning_content"] == "Hm."

    second = connect()
    await handle_line(second, "/load")
    assert re.search(r"/load 1 +just now, fake: What is a KV cache\?", screen.talk)
    await handle_line(second, "/load 2")
    assert "There is no conversation 2" in screen.talk
    await handle_line(second, "/load 1")
    await handle_line(second, "And then?")
    assert [content for _, content in said(server.bodies[-1])] == [
        "Be kind.",
        "What is a KV cache?",
        "Hello.",
        "And then?",
    ]
    assert second.path == first.path
    assert store.newest(1)[0].conversation.num_questions == 2


async def test_saving_to_a_file_and_loading_from_it(server, connect, screen, tmp_path):
    session = connect(system="Be kind.")
    await handle_line(session, "Hi")
    await handle_line(session, f"/save {tmp_path / 'talk.md'}")
    assert (
        tmp_path / "talk.md"
    ).read_text() == "## system\n\nBe kind.\n\n## user\n\nHi\n\n## assistant\n\nHello, wörld.\n"
    await handle_line(session, f"/save {tmp_path / 'talk.json'}")
    await handle_line(session, "/clear")
    await handle_line(session, f"/load {tmp_path / 'talk.json'}")
    assert kept(session) == [("user", "Hi"), ("assistant", "Hello, wörld.")]
    (tmp_path / "other.json").write_text("[]")
    for line, message in (
        (f"/save {tmp_path / 'missing' / 'talk.md'}", "Cannot write"),
        (f"/load {tmp_path / 'missing.json'}", "Cannot read"),
        (f"/load {tmp_path / 'other.json'}", "no conversation that tk chat saved"),
    ):
        await handle_line(session, line)
        assert message in screen.talk.replace("\n", " ")


async def test_stats_add_up(server, connect, screen):
    session = connect()
    await handle_line(session, "/stats")
    assert "Nothing has been answered yet" in screen.talk
    await handle_line(session, "One")
    await handle_line(session, "Two")
    await handle_line(session, "/stats")
    for row in (r"answers +2", r"tokens in +10", r"of them cached +6", r"tokens out +84"):
        assert re.search(row, screen.talk)


async def test_a_picture_is_sent_where_the_model_takes_it(server, connect, screen, tmp_path):
    server.refuse_images = False
    (tmp_path / "dot.gif").write_bytes(b"GIF89a....")
    session = connect()
    await handle_line(session, f"/image {tmp_path / 'dot.gif'}")
    assert (
        server.bodies[-1]["messages"][0]["content"][0]["image_url"]["url"] == PIXEL
    )  # the question whether it does
    await handle_line(session, "What is this?")
    assert server.bodies[-1]["messages"] == [
        {
            "role": "user",
            "content": [
                {
                    "type": "image_url",
                    "image_url": {"url": "data:image/gif;base64,R0lGODlhLi4uLg=="},
                },
                {"type": "text", "text": "What is this?"},
            ],
        }
    ]
    await handle_line(session, "And now?")
    assert server.bodies[-1]["messages"][-1]["content"] == "And now?"
    asked = len(server.bodies)
    await handle_line(session, f"/image {tmp_path / 'dot.gif'}")
    assert len(server.bodies) == asked  # it is known by now


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("png", b"\x89PNG\r\n\x1a\n and pixels"),
        ("jpeg", b"\xff\xd8\xff\xe0 and pixels"),
        ("webp", b"RIFF\x10\0\0\0WEBPVP8 "),
    ],
)
async def test_a_picture_is_a_part_as_the_official_client_has_it(
    server, connect, tmp_path, kind, content
):
    server.refuse_images = False
    server.models = [{"id": "fake", "capabilities": ["multimodal"]}]
    (tmp_path / "picture").write_bytes(content)  # what it is stands in it, not in its name
    session = connect()
    session.card = session.client.address.models()[0]
    await handle_line(session, f"/image {tmp_path / 'picture'}")
    assert server.bodies == []  # the server has told that its model takes pictures
    await handle_line(session, "What is this?")
    parts = server.bodies[-1]["messages"][0]["content"]
    picture, text = (
        TypeAdapter(ChatCompletionContentPartParam).validate_python(part) for part in parts
    )
    assert (picture["type"], text) == ("image_url", {"type": "text", "text": "What is this?"})
    begin, data = picture["image_url"]["url"].split(",")
    assert begin == f"data:image/{kind};base64"
    assert base64.b64decode(data, validate=True) == content


async def test_what_the_server_does_not_count_is_not_called_nothing(
    server, connect, screen, monkeypatch
):
    monkeypatch.setattr(
        "tests.chat.fake_server.USAGE", {"prompt_tokens": 5, "completion_tokens": 42}
    )  # as vLLM's
    session = connect()
    await handle_line(session, "One")
    await handle_line(session, "/stats")
    assert re.search(r"of them cached +the server does not say", screen.talk)


async def test_a_picture_that_is_too_large_stays_here(server, connect, screen, tmp_path):
    with (tmp_path / "large.png").open("wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        file.truncate(MOST_BYTES + 1)
    session = connect()
    await handle_line(session, f"/image {tmp_path / 'large.png'}")
    assert "at most 20 are sent" in screen.talk
    assert server.bodies == session.images == []


async def test_a_picture_that_cannot_be_sent_is_one_sentence(server, connect, screen, tmp_path):
    (tmp_path / "dot.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (tmp_path / "text.png").write_text("no picture")
    session = connect()
    for line, message in (
        (f"/image {tmp_path / 'dot.png'}", "fake takes no images: The server at"),
        (f"/image {tmp_path / 'text.png'}", "is no picture"),
        (f"/image {tmp_path / 'missing.png'}", "Cannot read"),
        ("/image", "/image FILE"),
    ):
        await handle_line(session, line)
        assert message in screen.talk.replace("\n", " ")
    session.card = ModelCard("blind", takes_images=False)
    await handle_line(session, f"/image {tmp_path / 'dot.png'}")
    assert "blind takes no images" in screen.talk
    assert session.images == []


def test_what_servers_tell_of_their_models_is_understood(server):
    server.models = [
        {"id": "tk", "max_model_len": 512},
        {
            "id": "router",
            "context_length": 8,
            "architecture": {"input_modalities": ["text", "image"]},
        },
        {"id": "cpp", "meta": {"n_ctx": 4}, "capabilities": ["completion"]},
        {"id": "m", "capabilities": {"vision": True}},
    ]
    assert Address(server.url).models() == [
        ModelCard("tk", 512),
        ModelCard("router", 8, True),
        ModelCard("cpp", 4, False),
        ModelCard("m", None, True),
    ]


async def test_commands_may_be_cut_short_where_that_is_clear(server, connect, screen):
    session = connect()
    assert not await handle_line(session, "/ex")
    for line, message in (
        ("/s", "Did you mean /system"),
        ("/systen", "Did you mean /system"),
        ("/xyz", "/help lists them"),
    ):
        assert await handle_line(session, line)
        assert message in screen.talk
    await handle_line(session, "/help")
    assert all(name in screen.talk for name in commands.COMMANDS)
    assert server.bodies == []


async def test_the_last_answer_and_its_code_are_copied(server, connect, screen, monkeypatch):
    copied = []
    monkeypatch.setattr(commands, "copy", lambda text, terminal: copied.append(text) or "Copied.")
    session = connect()
    await handle_line(session, "/copy")
    assert "There is no answer to copy." in screen.talk
    await handle_line(session, "Hi")
    await handle_line(session, "/copy code")
    assert "has no code" in screen.talk
    server.pieces = ["So:\n\n```sh\nls\n```\n\nand\n\n~~~\ncd\n~~~\n"]
    await handle_line(session, "How?")
    await handle_line(session, "/copy code")
    await handle_line(session, "/copy")
    assert copied == ["ls\n\ncd\n", "".join(server.pieces)]
