"""Slash commands."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from urllib.parse import quote

import orjson
import pytest
from openai.types.chat import ChatCompletionContentPartParam
from pydantic import TypeAdapter

from tests.chat.fake_server import messages_of
from tests.pictures.samples import gradient, saved
from toolkit.chat import commands, store
from toolkit.chat.answers.client import Address, ModelInfo
from toolkit.chat.commands import handle_line
from toolkit.chat.history import text_of
from toolkit.chat.images import MAX_BYTES, PIXEL


def history(session):
    """Return (role, content) of each message of the conversation."""
    return messages_of({"messages": session.conversation.messages})


async def test_retry_replaces_the_last_answer(server, connect):
    session = connect()
    await handle_line(session, "One")
    await handle_line(session, "Two")
    server.pieces = ["Better."]
    await handle_line(session, "/retry")
    assert messages_of(server.bodies[2]) == messages_of(server.bodies[1])
    assert history(session)[-2:] == [("user", "Two"), ("assistant", "Better.")]


@pytest.mark.parametrize("line", ["/retry", "/edit"])
async def test_failed_retry_or_edit_keeps_the_old_answer(server, connect, screen, line):
    session = connect()
    await handle_line(session, "One")
    session.model = ModelInfo("gone")
    for _ in range(2):
        await handle_line(session, line)
        if line == "/edit":
            await handle_line(session, "Another")
    assert "No model gone" in screen.stderr
    assert history(session) == [("user", "One"), ("assistant", "Hello, wörld.")]


async def test_edit_offers_and_replaces_the_last_question(server, connect):
    session = connect()
    await handle_line(session, "One")
    await handle_line(session, "Two")
    await handle_line(session, "/edit")
    assert session.draft == "Two"
    await handle_line(session, "Three")
    assert [content for _, content in messages_of(server.bodies[-1])] == [
        "One",
        "Hello, wörld.",
        "Three",
    ]
    assert [content for _, content in history(session)] == [
        "One",
        "Hello, wörld.",
        "Three",
        "Hello, wörld.",
    ]
    await handle_line(session, "Four")
    assert len(history(session)) == 6


async def test_edit_with_an_unreadable_schema_loses_nothing(server, connect, screen):
    session = connect()
    await handle_line(session, "One")
    await handle_line(session, "/set schema /missing.json")
    await handle_line(session, "/edit")
    await handle_line(session, "Two")
    assert "cannot read" in screen.stderr
    assert history(session) == [("user", "One"), ("assistant", "Hello, wörld.")]


async def test_edit_replaces_a_question_with_a_pending_tool_call(server, connect):
    server.pieces = [
        {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}]}
    ]
    session = connect()
    await handle_line(session, "One")
    assert session.pending_call is not None
    server.pieces = ["Fine."]
    await handle_line(session, "/edit")
    assert session.pending_call is None
    await handle_line(session, "Two")
    assert history(session) == [("user", "Two"), ("assistant", "Fine.")]


async def test_undo_removes_question_and_answer(server, connect, screen):
    session = connect()
    await handle_line(session, "/undo")
    assert "There is no question yet" in screen.stderr
    await handle_line(session, "One")
    await handle_line(session, "Two")
    await handle_line(session, "/undo")
    assert "Removed: Two" in screen.stderr
    assert history(session) == [("user", "One"), ("assistant", "Hello, wörld.")]


async def test_continue_extends_the_last_answer(server, connect, screen):
    session = connect()
    await handle_line(session, "/continue")
    assert "There is no answer to continue." in screen.stderr
    server.finish_reason = "length"
    await handle_line(session, "Hi")
    assert "cut at the token limit (/continue)" in screen.stderr
    server.pieces = [" And", " more."]
    await handle_line(session, "/continue")
    body = server.bodies[-1]
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert messages_of(body)[-1] == ("assistant", "Hello, wörld.")
    assert history(session) == [("user", "Hi"), ("assistant", "Hello, wörld. And more.")]


async def test_set_shows_changes_checks_and_resets_settings(server, connect, screen):
    session = connect(temperature=0.3)
    await handle_line(session, "/set temperature 1.5")
    await handle_line(session, "/set max-tokens 7")
    await handle_line(session, "Hi")
    assert (server.bodies[-1]["temperature"], server.bodies[-1]["max_tokens"]) == (1.5, 7)
    await handle_line(session, "/set temperature")
    await handle_line(session, "Hi")
    assert "temperature" not in server.bodies[-1]
    for line, message in (
        ("/set temperature 9", "/set temperature must be at most 2"),
        ("/set temprature 1", "Did you mean temperature?"),
        ("/set reasoning loud", "must be one of short, full, hidden"),
        ("/set parameter top_p 0.5", "top_p: 0.5"),
        ("/set parameter num_predict -1", "max_tokens: the server's default"),
        ("/set parameter num_predict 7", "max_tokens: 7"),
        ("/set parameter repeat_penalty 1.1", "repetition_penalty: 1.1"),
        ("/set parameter num_ctx 4096", "tk serve --max-model-len N"),
        ("/set verbose", "/stats"),
        ("/set system Be kind.", "The system message is set."),
        ("/set system", "Be kind."),
    ):
        await handle_line(session, line)
        assert message in screen.stderr
    await handle_line(session, "/show")
    assert re.search(r"max_tokens\s+7", screen.stderr)
    assert re.search(r"context\s+100 tokens", screen.stderr)


async def test_model_switches_to_a_listed_model(server, connect, screen):
    server.models.append({"id": "other/model", "context_length": 5})
    session = connect()
    await handle_line(session, "/model")
    assert "* fake" in screen.stderr
    await handle_line(session, "/model other/modle")
    assert "Did you mean other/model?" in screen.stderr
    server.models.extend({"id": f"adapter{number}"} for number in range(8))
    await handle_line(session, "/model none")
    assert "adapter5, 2 more (/model)." in " ".join(screen.stderr.split())
    await handle_line(session, "/model other/model")
    await handle_line(session, "Hi")
    assert server.bodies[-1]["model"] == "other/model"
    assert "context 47/5 " in screen.stderr


async def test_system_and_clear(server, connect, screen):
    session = connect()
    await handle_line(session, "/system")
    assert "There is no system message" in screen.stderr
    await handle_line(session, "Hi")
    await handle_line(session, "/system Be brief.")
    await handle_line(session, "/clear")
    await handle_line(session, "Hi")
    assert messages_of(server.bodies[-1]) == [("system", "Be brief."), ("user", "Hi")]


async def test_conversations_are_saved_privately_and_resumed(server, connect, screen):
    first = connect(system="Be kind.")
    server.pieces = [{"reasoning_content": "Hm."}, "Hello."]
    await handle_line(first, "What is a KV cache?")
    assert first.path.stat().st_mode & 0o077 == 0
    assert orjson.loads(first.path.read_bytes())["messages"][1]["reasoning_content"] == "Hm."

    second = connect()
    await handle_line(second, "/load")
    assert re.search(r"/load 1 +just now, fake: What is a KV cache\?", screen.stderr)
    await handle_line(second, "/load 2")
    assert "There is no conversation 2" in screen.stderr
    await handle_line(second, "/load 1")
    await handle_line(second, "And then?")
    assert [content for _, content in messages_of(server.bodies[-1])] == [
        "Be kind.",
        "What is a KV cache?",
        "Hello.",
        "And then?",
    ]
    assert second.path == first.path
    assert store.newest(1)[0].conversation.num_questions == 2


async def test_conversations_are_saved_and_loaded_by_name(server, connect, screen):
    session = connect()
    await handle_line(session, "One")
    unnamed = session.path
    await handle_line(session, "/save first-talk")
    assert [path.name for path in unnamed.parent.iterdir()] == ["first-talk.json"]
    await handle_line(session, "Two")  # goes to the same file
    other = connect()
    await handle_line(other, "/load")
    assert re.search(r"/load first-talk +just now, fake: One", screen.stderr)
    await handle_line(other, "/load first-talk")
    assert [content for _, content in history(other)][::2] == ["One", "Two"]
    third = connect()
    await handle_line(third, "Three")
    for line, message in (
        ("/load first-tlk", "no conversation first-tlk. Did you mean first-talk?"),
        ("/load other", "There is no conversation other. /load lists them."),
        ("/save my talk", "The name of a conversation has letters, digits, - and _"),
    ):
        await handle_line(third, line)
        assert message in screen.stderr
    assert not Path("my talk").exists()
    await handle_line(third, "/save first-talk")
    assert "There is a conversation first-talk already" in screen.stderr
    assert third.path.exists()


async def test_words_that_leave_the_chat_and_show_the_help(server, connect, screen):
    session = connect()
    for line in ("exit", "quit", "/bye", "/quit", "/exit"):
        assert not await handle_line(session, line)
    assert await handle_line(session, "/?")
    assert "list commands and keys" in screen.stderr
    assert await handle_line(session, '"""exit"""')
    assert history(session)[0] == ("user", "exit")


async def test_save_and_load_with_files(server, connect, screen, tmp_path):
    session = connect(system="Be kind.")
    await handle_line(session, "Hi")
    await handle_line(session, f"/save {tmp_path / 'chat.md'}")
    assert (
        tmp_path / "chat.md"
    ).read_text() == "## system\n\nBe kind.\n\n## user\n\nHi\n\n## assistant\n\nHello, wörld.\n"
    await handle_line(session, f"/save {tmp_path / 'chat.json'}")
    await handle_line(session, "/clear")
    await handle_line(session, f"/load {tmp_path / 'chat.json'}")
    assert history(session) == [("user", "Hi"), ("assistant", "Hello, wörld.")]
    (tmp_path / "other.json").write_text("[]")
    for line, message in (
        (f"/save {tmp_path / 'missing' / 'chat.md'}", "Cannot write"),
        (f"/load {tmp_path / 'missing.json'}", "Cannot read"),
        (f"/load {tmp_path / 'other.json'}", "is not a conversation saved by tk chat"),
    ):
        await handle_line(session, line)
        assert message in screen.stderr.replace("\n", " ")


async def test_stats_add_up_the_answers(server, connect, screen):
    session = connect()
    await handle_line(session, "/stats")
    assert "There are no answers yet" in screen.stderr
    await handle_line(session, "One")
    await handle_line(session, "Two")
    await handle_line(session, "/stats")
    for row in (r"answers +2", r"tokens in +10", r"cached +6", r"tokens out +84"):
        assert re.search(row, screen.stderr)


async def test_image_is_sent_with_the_next_question(server, connect, screen, tmp_path):
    server.refuse_images = False
    (tmp_path / "dot.gif").write_bytes(b"GIF89a....")
    session = connect()
    await handle_line(session, f"/image {tmp_path / 'dot.gif'}")
    # The first request finds out whether the model accepts images.
    assert server.bodies[-1]["messages"][0]["content"][0]["image_url"]["url"] == PIXEL
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
    assert len(server.bodies) == asked  # known by now


@pytest.mark.parametrize(
    ("line", "question"),
    [
        ("{path}", None),
        ("'{path}' ", None),
        ("file://{quoted}", None),
        ("What is this? {escaped}", "What is this?"),
        ('Compare them: {escaped} "{path}"', "Compare them:"),
    ],
)
async def test_dropped_paths_are_images(server, connect, screen, tmp_path, line, question):
    """Terminals write the path of a file that is dropped, quoted or escaped."""
    server.refuse_images = False
    path = tmp_path / "my dot.png"
    path.write_bytes(saved(gradient(5, 3)))
    session = connect()
    line = line.format(path=path, quoted=quote(str(path)), escaped=str(path).replace(" ", "\\ "))
    await handle_line(session, line)
    assert "[image my dot.png 5x3]" in screen.stderr
    if question is None:
        assert "Attached to the next question: [image my dot.png 5x3]" in screen.stderr
        await handle_line(session, question := "And?")
    *images, text = server.bodies[-1]["messages"][-1]["content"]
    assert text == {"type": "text", "text": question}
    url = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    part = {"type": "image_url", "image_url": {"url": url}}
    assert images == [part] * line.count("my")
    shown = "\n".join(["[image my dot.png 5x3]"] * len(images))
    assert text_of(session.conversation.messages[0]) == f"{shown}\n{question}"


async def test_paths_of_other_files_are_text(server, connect, tmp_path):
    """So are those of images, if the model accepts none."""
    (tmp_path / "notes.txt").write_text("Notes.")
    (tmp_path / "dot.png").write_bytes(saved(gradient(5, 3)))
    session = connect()
    for question in (f"Read {tmp_path}/notes.txt", f"Read {tmp_path}/none.png",
                     f"Read {tmp_path}/dot.png"):  # fmt: skip
        await handle_line(session, question)
        assert server.bodies[-1]["messages"][-1]["content"] == question


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("png", b"\x89PNG\r\n\x1a\n and pixels"),
        ("jpeg", b"\xff\xd8\xff\xe0 and pixels"),
        ("webp", b"RIFF\x10\0\0\0WEBPVP8 "),
    ],
)
async def test_image_part_has_the_official_clients_type(server, connect, tmp_path, kind, content):
    server.refuse_images = False
    server.models = [{"id": "fake", "capabilities": ["multimodal"]}]
    (tmp_path / "picture").write_bytes(content)  # the content has the format, not the name
    session = connect()
    session.model = session.client.address.list_models()[0]
    await handle_line(session, f"/image {tmp_path / 'picture'}")
    assert server.bodies == []  # the server lists image input
    await handle_line(session, "What is this?")
    parts = server.bodies[-1]["messages"][0]["content"]
    picture, text = (
        TypeAdapter(ChatCompletionContentPartParam).validate_python(part) for part in parts
    )
    assert (picture["type"], text) == ("image_url", {"type": "text", "text": "What is this?"})
    begin, data = picture["image_url"]["url"].split(",")
    assert begin == f"data:image/{kind};base64"
    assert base64.b64decode(data, validate=True) == content


async def test_stats_without_cached_tokens_from_the_server(server, connect, screen, monkeypatch):
    usage = {"prompt_tokens": 5, "completion_tokens": 42}  # vLLM's
    monkeypatch.setattr("tests.chat.fake_server.USAGE", usage)
    session = connect()
    await handle_line(session, "One")
    await handle_line(session, "/stats")
    assert re.search(r"cached +not reported by the server", screen.stderr)


async def test_image_that_is_too_large_is_not_sent(server, connect, screen, tmp_path):
    with (tmp_path / "large.png").open("wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        file.truncate(MAX_BYTES + 1)
    session = connect()
    await handle_line(session, f"/image {tmp_path / 'large.png'}")
    assert "the limit is 20.0 MiB" in screen.stderr
    assert server.bodies == session.images == []


async def test_image_errors(server, connect, screen, tmp_path):
    (tmp_path / "dot.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (tmp_path / "text.png").write_text("no picture")
    session = connect()
    for line, message in (
        (f"/image {tmp_path / 'dot.png'}", "fake accepts no images: The server at"),
        (f"/image {tmp_path / 'text.png'}", "is not a PNG"),
        (f"/image {tmp_path / 'missing.png'}", "Cannot read"),
        ("/image", "/image FILE"),
    ):
        await handle_line(session, line)
        assert message in screen.stderr.replace("\n", " ")
    session.model = ModelInfo("blind", accepts_images=False)
    await handle_line(session, f"/image {tmp_path / 'dot.png'}")
    assert "blind accepts no images" in screen.stderr
    assert session.images == []


def test_models_of_different_servers_are_parsed(server):
    server.models = [
        {"id": "tk", "max_model_len": 512, "owned_by": "tk", "tasks": ["generate", "chat"]},
        {
            "id": "router",
            "context_length": 8,
            "architecture": {"input_modalities": ["text", "image"]},
        },
        {"id": "cpp", "meta": {"n_ctx": 4}, "capabilities": ["completion"]},
        {"id": "m", "capabilities": {"vision": True}},
    ]
    assert Address(server.url).list_models() == [
        ModelInfo("tk", 512, tasks=("generate", "chat")),
        ModelInfo("router", 8, True),
        ModelInfo("cpp", 4, False),
        ModelInfo("m", None, True),
    ]


async def test_command_prefixes_are_accepted_if_unambiguous(server, connect, screen):
    session = connect()
    assert not await handle_line(session, "/ex")
    for line, message in (
        ("/s", "Did you mean /system"),
        ("/systen", "Did you mean /system"),
        ("/xyz", "/help lists them"),
    ):
        assert await handle_line(session, line)
        assert message in screen.stderr
    await handle_line(session, "/help")
    assert all(name in screen.stderr for name in commands.COMMANDS)
    assert server.bodies == []


async def test_copy_takes_the_last_answer_or_its_code(server, connect, screen, monkeypatch):
    copied = []
    monkeypatch.setattr(commands, "copy", lambda text, terminal: copied.append(text) or "Copied.")
    session = connect()
    await handle_line(session, "/copy")
    assert "There is no answer to copy." in screen.stderr
    await handle_line(session, "Hi")
    await handle_line(session, "/copy code")
    assert "has no code" in screen.stderr
    server.pieces = ["So:\n\n```sh\nls\n```\n\nand\n\n~~~\ncd\n~~~\n"]
    await handle_line(session, "How?")
    await handle_line(session, "/copy code")
    await handle_line(session, "/copy")
    assert copied == ["ls\n\ncd\n", "".join(server.pieces)]
