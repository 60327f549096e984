"""Pictures in every interface, with the official clients, compared with the offline engine."""

from __future__ import annotations

import base64
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import anthropic
import ollama
import openai
import psutil
import pytest
from PIL import Image

from tests import seeing
from tests.local import LocalServer
from tests.pictures.samples import data_url, gradient, saved
from tests.server import Server, gone, until
from toolkit import LLM, SamplingParams
from toolkit.errors import InvalidRequestError

TOKENS = 8
WIDE, TALL = gradient(44, 30), gradient(30, 44)
PNG, OTHER_PNG = saved(WIDE), saved(TALL)
URL, OTHER_URL = data_url(PNG), data_url(OTHER_PNG)
IMAGE_TOKENS = 24  # of either: 6 x 4 of 8 x 8 pixels
SAMPLING = {"model": "tiny", "max_tokens": TOKENS, "temperature": 0.0}
MORE = {"ignore_eos": True}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing.save(tmp_path_factory.mktemp("models") / "seeing")


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of pictures that the server may read."""
    folder = tmp_path_factory.mktemp("media")
    (folder / "wide.png").write_bytes(PNG)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, media: Path) -> Iterator[Server]:
    served = LocalServer(
        str(folder),
        *("--served-model-name", "tiny", "--num-gpu-blocks-override", "300"),
        *("--limit-mm-per-prompt", "image=3", "--trust-request-chat-template"),
        *("--allowed-local-media-path", str(media), "--mm-cache-gib", "0.001"),
        cwd=folder.parent,
    )
    yield served
    served.await_health()
    served.stop()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.openai() as client:
        yield client


@pytest.fixture(scope="module")
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def llm(folder: Path, media: Path) -> Iterator[LLM]:
    settings = {"device": "cpu", "num_threads": 1, "num_gpu_blocks_override": 300}
    settings["mm_cache_gib"] = 0.001
    llm = LLM(str(folder), allowed_local_media_path=str(media), **settings)
    yield llm
    llm.shutdown()


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def image_url(url: str = URL, **more: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url} | more}


def user(*content: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


def block(data: bytes = PNG) -> dict[str, Any]:
    source = {
        "type": "base64",
        "media_type": "image/png",
        "data": base64.b64encode(data).decode(),
    }
    return {"type": "image", "source": source}


def tokens_of(llm: LLM, *messages: tuple[str, str]) -> list[int]:
    """Return the prompt of (role, content). In contents, <I> is a place of a picture."""
    place = [seeing.VISION_START, seeing.IMAGE, seeing.VISION_END]
    ids: list[int] = []
    for role, content in (*messages, ("assistant", "")):
        ids += [seeing.START, *llm.tokenize(f"{role}\n")]
        for index, one in enumerate(content.split("<I>")):
            ids += (place if index else []) + llm.tokenize(one)
        ids += [seeing.END, *llm.tokenize("\n")]
    return ids[:-2]


def answers(llm: LLM, prompt: list[int], *images: Image.Image, **params: Any) -> list[str]:
    """Return the answers of the offline engine to a prompt with pictures of Pillow."""
    given = {"prompt_token_ids": prompt, "multi_modal_data": {"image": list(images)}}
    defaults = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
    [done] = llm.generate(given, SamplingParams(**defaults | params), use_tqdm=False)
    return [one.text for one in done.outputs]


# ---- answers


def test_ollama_has_the_answer_of_the_chat(server: Server, client: openai.OpenAI) -> None:
    wanted = client.chat.completions.create(
        model="tiny", messages=user(image_url(), text("What?")), max_tokens=TOKENS, temperature=0
    )
    options = {"temperature": 0, "num_predict": TOKENS}
    with ollama.Client(server.url) as asked:
        message = {"role": "user", "content": "What?", "images": [PNG]}
        answer = asked.chat("tiny", [message], options=options)
        assert answer.message.content == wanted.choices[0].message.content
        assert answer.prompt_eval_count == wanted.usage.prompt_tokens
        answer = asked.generate("tiny", "What?", images=[PNG], options=options)
        assert answer.response == wanted.choices[0].message.content
        assert "vision" in asked.show("tiny").capabilities
        with pytest.raises(ollama.ResponseError, match=r"messages\[0\].images\[1\]|picture"):
            asked.chat("tiny", [message | {"images": [PNG, b"broken"]}])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("messages", "prompt", "images"),
    [
        (user(text("a"), image_url(), text("b")), [("user", "a<I>b")], [WIDE]),
        (user(text("a"), image_url(OTHER_URL), text("b")), [("user", "a<I>b")], [TALL]),
        (
            user(image_url(OTHER_URL, detail="low"), {"type": "image_url", "image_url": URL}),
            [("user", "<I><I>")],
            [TALL, WIDE],
        ),
        (
            [
                {"role": "system", "content": "Look."},
                {"role": "tool", "tool_call_id": "1", "content": [image_url()]},
                {"role": "user", "content": [text("What is"), text(" it?")]},
            ],
            [("system", "Look."), ("tool", "<I>"), ("user", "What is it?")],
            [WIDE],
        ),
    ],
    ids=["one", "another", "two", "of a tool"],
)
def test_a_chat_has_the_answer_of_the_engine(
    client: openai.OpenAI, llm: LLM, messages: Any, prompt: Any, images: Any, stream: bool
) -> None:
    """Pictures are read in their order, between the texts."""
    [expected] = answers(llm, tokens_of(llm, *prompt), *images)
    asked = SAMPLING | {"messages": messages, "extra_body": MORE}
    if not stream:
        done = client.chat.completions.create(**asked)
        assert done.choices[0].message.content == expected
        usage = done.usage
    else:
        options = {"include_usage": True}
        chunks = list(client.chat.completions.create(stream=True, stream_options=options, **asked))
        deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(deltas) == expected
        usage = chunks[-1].usage
    assert usage.prompt_tokens_details.image_tokens == IMAGE_TOKENS * len(images)
    expanded = len(tokens_of(llm, *prompt)) + (IMAGE_TOKENS - 1) * len(images)
    assert usage.prompt_tokens == expanded


def test_pictures_change_answers(llm: LLM) -> None:
    prompt = tokens_of(llm, ("user", "a<I>b"))
    assert answers(llm, prompt, WIDE) != answers(llm, prompt, TALL)


def test_options_work_with_pictures(client: openai.OpenAI, llm: LLM) -> None:
    """Several answers with a seed, log-probabilities and the beginning of an answer."""
    messages = [*user(image_url()), {"role": "assistant", "content": "It"}]
    done = client.chat.completions.create(
        **SAMPLING | {"temperature": 1.0},
        messages=messages,
        n=2,
        seed=5,
        logprobs=True,
        extra_body=MORE | {"continue_final_message": True, "add_generation_prompt": False},
    )
    prompt = tokens_of(llm, ("user", "<I>")) + llm.tokenize("It")
    assert [one.message.content for one in done.choices] == answers(
        llm, prompt, WIDE, temperature=1.0, n=2, seed=5
    )
    assert len(done.choices[0].logprobs.content) == TOKENS


def test_structured_answers_are_about_pictures(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        **SAMPLING,
        messages=user(image_url()),
        extra_body={"structured_outputs": {"choice": ["cat", "dog"]}},
    )
    assert done.choices[0].message.content in ("cat", "dog")


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_the_answer_of_the_engine(
    client: openai.OpenAI, llm: LLM, stream: bool
) -> None:
    given = [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "a"},
                {"type": "input_image", "image_url": URL, "detail": "auto"},
            ],
        },
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "1",
            "output": [{"type": "input_image", "image_url": OTHER_URL}],
        },
    ]
    # The template has no place for calls.
    call = '{"name": "look", "arguments": {}}'
    messages = [("user", "a<I>"), ("assistant", call), ("user", "Result of look:\n<I>")]
    [expected] = answers(llm, tokens_of(llm, *messages), WIDE, TALL, ignore_eos=False)
    asked = {"model": "tiny", "max_output_tokens": TOKENS, "temperature": 0.0, "input": given}
    done = client.responses.create(stream=stream, **asked)
    if stream:
        done = list(done)[-1].response
    assert done.output_text == expected
    assert done.usage.input_tokens_details.image_tokens == 2 * IMAGE_TOKENS
    more = {"input": "b", "previous_response_id": done.id, "max_output_tokens": 1}
    continued = client.responses.create(model="tiny", **more)
    assert continued.usage.input_tokens_details.image_tokens == 2 * IMAGE_TOKENS
    [item] = client.responses.input_items.list(done.id, order="asc", limit=1).data
    assert [part.type for part in item.content] == ["input_text", "input_image"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_has_the_answer_of_the_engine(
    claude: anthropic.Anthropic, llm: LLM, media: Path, stream: bool
) -> None:
    """Results of calls come before the rest of their message, with their pictures."""
    file = {"type": "image", "source": {"type": "url", "url": f"file://{media}/wide.png"}}
    content = [
        text("a"),
        file,
        {"type": "tool_result", "tool_use_id": "1", "content": [text("x"), block(OTHER_PNG)]},
        text("b"),
        text("c"),
    ]
    [expected] = answers(
        llm, tokens_of(llm, ("tool", "x<I>"), ("user", "a<I>b\nc")), TALL, WIDE, ignore_eos=False
    )
    asked = {
        "model": "tiny",
        "max_tokens": TOKENS,
        "messages": user(*content),
        "extra_body": {"temperature": 0.0},
    }
    if stream:
        with claude.messages.stream(**asked) as events:
            found = events.get_final_message()
    else:
        found = claude.messages.create(**asked)
    assert "".join(one.text for one in found.content) == expected


# ---- tokens


def test_tokens_of_pictures_are_counted(
    server: Server, claude: anthropic.Anthropic, llm: LLM
) -> None:
    """A header is enough: the rest of the file is missing."""
    header = PNG[:60]
    prompt = tokens_of(llm, ("user", "<I>?"))
    asked = {"messages": user(image_url(data_url(header)), text("?"))}
    found = server.http.post("/tokenize", json=asked).json()
    at = prompt.index(seeing.IMAGE)
    assert found["tokens"] == [*prompt[:at], *[seeing.IMAGE] * IMAGE_TOKENS, *prompt[at + 1 :]]
    counted = claude.messages.count_tokens(model="tiny", messages=user(block(header), text("?")))
    assert counted.input_tokens == found["count"]


def test_models_are_listed_with_their_inputs(server: Server) -> None:
    [model] = server.http.get("/v1/models").json()["data"]
    assert model["input_modalities"] == ["text", "image"]


# ---- templates


@pytest.mark.parametrize("template", [seeing.TEXT_TEMPLATE, seeing.TEMPLATE])
def test_templates_without_parts_get_placeholders(
    client: openai.OpenAI, llm: LLM, template: str
) -> None:
    """A placeholder in a text is text in any template."""
    parts = [text("<|image_pad|>"), image_url(), text("b")]
    expected = tokens_of(llm, ("user", "@<I>b"))
    at = expected.index(llm.tokenize("@")[0])
    expected[at : at + 1] = [llm.tokenize(letter)[0] for letter in "<|image_pad|>"]
    prompt = llm.chat_prompt(user(*parts), chat_template=template)
    assert [t for i, t in enumerate(prompt) if t != seeing.IMAGE or prompt[i - 1] != t] == expected
    done = client.chat.completions.create(
        **SAMPLING,
        messages=user(*parts),
        extra_body={"chat_template": template, "return_token_ids": True},
    )
    assert done.prompt_token_ids == prompt


# ---- errors

TRUNCATED = data_url(PNG[: len(PNG) // 2])
ERRORS: dict[str, tuple[list[Any], str, str]] = {
    "bad base64": (
        [image_url("data:image/png;base64,ab!c")],
        "messages[0].content[0].image_url.url",
        " is not valid base64: it has '!' at position 2",
    ),
    "text file": (
        [text("x"), {"type": "image_url", "image_url": data_url(b"Hello, here is text.")}],
        "messages[0].content[1].image_url",
        " is not a picture that can be read: its first bytes are 'Hello, here is t'; PNG, JPEG, "
        "WebP, GIF (first frame), BMP and TIFF are supported",
    ),
    "truncated": (
        [image_url(), image_url(TRUNCATED)],
        "messages[0].content[1].image_url.url",
        " is a PNG file of 44 x 30 pixels that is truncated or damaged: only a part of them can be "
        "decoded",
    ),
    "empty URL": (
        [image_url("")],
        "messages[0].content[0].image_url.url",
        " must be a data: URL with base64, an http(s): URL or a file: URL, not ''",
    ),
    "empty data": (
        [image_url("data:image/png;base64,")],
        "messages[0].content[0].image_url.url",
        " is an empty file",
    ),
    "web": (
        [image_url("http://127.0.0.1:9/x.png")],
        "messages[0].content[0].image_url.url",
        " is an http(s) URL, and this server downloads none; send the picture in a data: URL",
    ),
    "other folder": (
        [image_url("file:///etc/passwd")],
        "messages[0].content[0].image_url.url",
        " is a file: URL outside the folder that this server reads",
    ),
    "too many": (
        [image_url("http://127.0.0.1:9/x.png")] * 4,
        "messages",
        "The prompt has 4 pictures, and at most 3 are allowed (--limit-mm-per-prompt).",
    ),
    "unknown part": (
        [{"type": "video_url", "video_url": {}}],
        "messages[0].content",
        "messages[0].content: Only content parts of the types 'text', 'image_url' and "
        "'input_audio' are supported, not 'video_url'.",
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ERRORS)
def test_a_picture_that_cannot_be_used_is_an_error(server: Server, name: str, stream: bool) -> None:
    content, param, message = ERRORS[name]
    answer = server.http.post(CHAT, json={"messages": user(*content), "stream": stream})
    assert answer.status_code == 400
    error = answer.json()["error"]
    expected = param + message if message.startswith(" ") else message
    assert (error["param"], error["message"]) == (param, expected)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (
            CHAT,
            {"messages": [{"role": "assistant", "content": [image_url()]}]},
            "messages[0].content[0].image_url.url is a picture in a message of the role "
            "'assistant'. Send pictures in messages of the roles user and tool.",
        ),
        (
            CHAT,
            {"messages": user(image_url()), "mm_processor_kwargs": {"max_pixels": 64}},
            "mm_processor_kwargs: A request cannot set it; it is an option of the server, "
            "--mm-processor-kwargs.",
        ),
        (
            CHAT,
            {"messages": user(image_url()), "use_beam_search": True, "max_tokens": 2},
            "Beam search takes text alone: the prompt has a picture or a clip.",
        ),
        (
            "/v1/responses",
            {"input": user({"type": "input_image", "file_id": "file-1"})},
            "input[0].content[0].file_id is not supported: this server stores no files. Send the "
            "picture as image_url.",
        ),
        (
            "/v1/responses",
            {"input": user({"type": "input_image", "image_url": URL}), "truncation": "auto"},
            "truncation could cut a picture. Leave it out.",
        ),
        (
            "/v1/responses",
            {"input": user({"type": "input_image", "image_url": "x"})},
            "input[0].content[0].image_url must be a data: URL with base64, an http(s): URL or a "
            "file: URL, not 'x'",
        ),
        (
            "/v1/messages",
            {"messages": user({"type": "image", "source": {"type": "file", "file_id": "x"}})},
            "messages[0].content[0].source.file_id is not supported: this server stores no files. "
            "Send the picture in base64.",
        ),
        (
            "/v1/messages",
            {"messages": user(block(b"x")), "system": [block()]},
            "system[0].source.data is a picture in a message of the role 'system'. Send pictures "
            "in messages of the roles user and tool.",
        ),
        (
            "/v1/messages",
            {"messages": user({"type": "document", "source": {}})},
            "messages[0].content: Only content blocks of the types text, image, thinking, "
            "redacted_thinking, tool_use, tool_result are supported here, not 'document'.",
        ),
        (
            "/v1/messages/count_tokens",
            {"messages": user(block(b"x"))},
            "messages[0].content[0].source.data is not a picture that can be read: its first bytes "
            "are 'x'; PNG, JPEG, WebP, GIF (first frame), BMP and TIFF are supported",
        ),
    ],
)
def test_other_requests_with_pictures_are_refused(
    server: Server, path: str, body: dict[str, Any], message: str
) -> None:
    more = {"max_tokens": TOKENS} if path == "/v1/messages" else {}
    answer = server.http.post(path, json=body | more)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)


def test_empty_mm_processor_kwargs_are_accepted(server: Server) -> None:
    body = SAMPLING | {"messages": user(image_url()), "mm_processor_kwargs": {}}
    assert server.http.post(CHAT, json=body).status_code == 200


# ---- offline


def test_llm_chat_takes_pictures(llm: LLM, media: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    conversations = [
        user(text("a"), {"type": "image", "image": WIDE}, text("b")),
        user(text("a"), {"type": "image_pil", "image_pil": WIDE}, text("b")),
        user(text("a"), image_url(), text("b")),
        user(text("a"), image_url(f"file://{media}/wide.png"), text("b")),
        user(text("ab")),
    ]
    found = [one.outputs[0].text for one in llm.chat(conversations, params, use_tqdm=False)]
    expected = answers(llm, tokens_of(llm, ("user", "a<I>b")), WIDE)
    assert found[:4] == expected * 4
    assert found[4:] == answers(llm, tokens_of(llm, ("user", "ab")))


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (
            {"role": "user", "content": [image_url("file:///etc/passwd")]},
            "messages[0].content[0].image_url.url is a file: URL outside the folder that this "
            "server reads",
        ),
        (
            {"role": "user", "content": [{"type": "image", "image": "x.png"}]},
            "messages[0].content[0].image has a str, where images of Pillow must be.",
        ),
        (
            {"role": "system", "content": [image_url()]},
            "messages[0].content[0].image_url.url is a picture in a message of the role 'system'. "
            "Send pictures in messages of the roles user and tool.",
        ),
        (
            {"role": "user", "content": [image_url(), {"type": "video"}]},
            "messages[0].content[1] must be text, a picture or sound, not a part of the type "
            "'video'",
        ),
    ],
)
def test_llm_chat_refuses_other_parts(llm: LLM, message: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.chat([message], use_tqdm=False)
    assert caught.value.message == problem


# ---- commands


def test_tk_run_takes_pictures(
    folder: Path, llm: LLM, tk_here: Callable[..., CompletedProcess[str]], tmp_path: Path
) -> None:
    for name, data in (("a.png", OTHER_PNG), ("b.png", PNG)):
        (tmp_path / name).write_bytes(data)
    files = ["--image", str(tmp_path / "a.png"), "--image", str(tmp_path / "b.png")]
    done = tk_here("run", str(folder), "What?", *files, "--max-tokens", str(TOKENS))
    prompt = tokens_of(llm, ("user", "<I><I>What?"))
    [expected] = answers(llm, prompt, TALL, WIDE, ignore_eos=False)
    assert done.stdout == f"{expected}\n", done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--image", "none.png"], "Cannot read none.png: No such file or directory."),
        (["--image", "text.png"], "text.png is not a PNG, JPEG, GIF or WebP image."),
        (
            ["--image", "dot.png", "--raw"],
            "--image needs a model with a chat template, and no --raw.",
        ),
    ],
)
def test_tk_run_refuses_other_files(
    folder: Path, tk_here: Any, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "text.png").write_text("Hello")
    (tmp_path / "dot.png").write_bytes(PNG)
    done = tk_here("run", str(folder), "What?", *arguments, cwd=tmp_path)
    assert (done.returncode != 0, message in done.stderr) == (True, True), done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--allowed-media-domains", "*.example.com"],
            "The allowed domain '*.example.com' is not valid: an entry is like example.com, "
            ".example.com for all hosts below it, or example.com:8080.",
        ),
        (
            ["--allowed-local-media-path", "none"],
            "--allowed-local-media-path is 'none', which is not a folder.",
        ),
    ],
)
def test_servers_check_where_pictures_are_from(
    folder: Path, tk_here: Any, tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = tk_here("serve", str(folder), *arguments, cwd=tmp_path)
    assert (done.returncode != 0, message in done.stderr) == (True, True), done.stderr


def test_api_workers_take_pictures(folder: Path, llm: LLM, tmp_path: Path) -> None:
    server = Server(str(folder), "--api-workers", "2", "--num-gpu-blocks-override", "300",
                    "--mm-cache-gib", "0.001", cwd=tmp_path)  # fmt: skip
    try:
        body = SAMPLING | {"model": None, "messages": user(image_url())} | MORE
        done = server.http.post(CHAT, json=body).json()
        family = psutil.Process(server.pid).children(recursive=True)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        until(lambda: all(gone(one) for one in family))
    finally:
        server.stop()
    expected = answers(llm, tokens_of(llm, ("user", "<I>")), WIDE)
    assert [one["message"]["content"] for one in done["choices"]] == expected
