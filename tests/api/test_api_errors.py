"""Requests that the server rejects, and its error messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from tests.api.conftest import CONTEXT, Reference
from tests.local import LocalServer
from tests.server import Server, until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
JSON = {"Content-Type": "application/json"}
GOOD = {"prompt": "The sea is", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def check_error(answer: httpx.Response, status: int) -> dict[str, str | None]:
    """Return the error of a response, in OpenAI's format or inside Anthropic's."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    around = {"type", "request_id"} if answer.request.url.path.startswith("/v1/messages") else set()
    assert body.keys() == {"error"} | around
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert len(body["error"]["message"]) > 10
    assert isinstance(body["error"]["type"], str)
    assert "Traceback" not in answer.text
    return body["error"]


# ---- too long


def chat(size: int) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "x" * size}]}


OVERFLOW = f"This model's maximum context length is {CONTEXT} tokens. However, "
"""OpenAI's words. litellm, pydantic-ai and other clients look for them to use another model."""


@pytest.mark.parametrize(
    ("path", "source", "limit"),
    [
        (COMPLETIONS, "prompt", "max_tokens"),
        (CHAT, "messages", "max_tokens"),
        (CHAT, "messages", "max_completion_tokens"),
        ("/v1/responses", "input", "max_output_tokens"),
    ],
)
def test_context_overflow_has_the_words_of_openai(
    http: httpx.Client, path: str, source: str, limit: str
) -> None:
    def overflow(size: int, max_tokens: int) -> dict[str, str | None]:
        body = chat(size) if source == "messages" else {source: "x" * size}
        error = check_error(http.post(path, json=body | {limit: max_tokens}), 400)
        assert error["message"].startswith(OVERFLOW)
        assert error["type"] == "invalid_request_error"
        assert error["code"] == "context_length_exceeded"
        return error

    error = overflow(CONTEXT + 3, 5)
    assert error["param"] == source
    assert re.search(
        rf"your {source} resulted in 8[12]\d\d tokens. Please reduce", error["message"]
    )
    for max_tokens in (CONTEXT, 10**12, 2**40):
        error = overflow(3, max_tokens)
        assert error["param"] == limit
        asked = rf" \(\d+ in the {source}, {max_tokens} in the completion\)\. Please reduce"
        assert re.search(asked, error["message"])


@pytest.mark.parametrize(
    ("size", "max_tokens", "expected"),
    [
        (CONTEXT + 3, 5, rf"prompt is too long: 8[12]\d\d tokens > {CONTEXT} maximum"),
        (
            3,
            10**12,
            r"input length and `max_tokens` exceed context limit: \d+ \+ 10{12} > 8192, .*",
        ),
    ],
)
def test_context_overflow_has_the_words_of_anthropic(
    http: httpx.Client, size: int, max_tokens: int, expected: str
) -> None:
    answer = http.post("/v1/messages", json=chat(size) | {"max_tokens": max_tokens})
    error = answer.json()["error"]
    assert re.fullmatch(expected, error["message"])
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
    assert error["param"] == ("messages" if size > CONTEXT else "max_tokens")


def test_an_extremely_long_prompt_is_refused_before_tokenization(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=str(CONTEXT)):
        client.completions.create(model="tiny", prompt="x" * 5_000_000, max_tokens=1)


def test_a_prompt_that_leaves_no_room_for_output_is_refused(client: openai.OpenAI) -> None:
    asked = rf"{CONTEXT + 1} tokens \({CONTEXT} in the prompt, 1 in the completion\)"
    with pytest.raises(openai.BadRequestError, match=asked):
        client.completions.create(model="tiny", prompt=[1] * CONTEXT, max_tokens=1)


@pytest.mark.parametrize("max_tokens", [CONTEXT - 4, 10**400], ids=["by one", "huge"])
def test_max_tokens_beyond_the_context_is_refused_not_reduced(
    http: httpx.Client, max_tokens: int
) -> None:
    body = json.dumps({"prompt": "12345", "max_tokens": max_tokens})
    answer = http.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    error = check_error(answer, 400)
    assert "(5 in the prompt, " in error["message"]
    assert error["message"].endswith(f"or set max_tokens to at most {CONTEXT - 5}.")


def test_too_large_a_body_is_413(http: httpx.Client) -> None:
    body = b'{"prompt": "' + b"x" * (33 * 2**20) + b'"}'
    headers = {"Content-Type": "application/json"}
    assert (
        "32 MiB"
        in check_error(http.post(COMPLETIONS, content=body, headers=headers), 413)["message"]
    )

    def chunks() -> Iterator[bytes]:
        for start in range(0, len(body), 2**20):
            yield body[start : start + 2**20]

    # Chunked, without a Content-Length.
    assert (
        "32 MiB"
        in check_error(http.post(COMPLETIONS, content=chunks(), headers=headers), 413)["message"]
    )


# ---- invalid requests


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"{}", b"null", b"[]", b'"text"', b"\xff\xfe", b'{"prompt": "a",}',
        b"[" * 100_000, b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda body: body[:12].decode("latin-1"),
)  # fmt: skip
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_invalid_json_is_400(http: httpx.Client, path: str, body: bytes) -> None:
    check_error(http.post(path, content=body, headers={"Content-Type": "application/json"}), 400)


def test_a_body_without_a_json_content_type_is_400(http: httpx.Client) -> None:
    """So a browser's form, which needs no preflight, cannot make requests."""
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    error = check_error(http.post(COMPLETIONS, content=json.dumps(GOOD), headers=form), 400)
    assert "Content-Type: application/json" in error["message"]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize(
    "name",
    [
        "temperature",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "max_tokens",
    ],
)
def test_non_finite_numbers_are_refused_by_name(http: httpx.Client, name: str, value: str) -> None:
    body = f'{{"prompt": "a", "{name}": {value}}}'
    answer = http.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    assert check_error(answer, 400)["param"] == name


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        (COMPLETIONS, {"prompt": "good"},
         ["stream", "echo", "ignore_eos", "use_beam_search", "length_penalty"]),
        (CHAT, {"messages": HELLO},
         ["stream", "logprobs", "parallel_tool_calls", "skip_special_tokens", "priority"]),
        ("/v1/responses", {"input": "good"}, ["stream", "text", "tools", "max_output_tokens"]),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 2},
         ["stream", "system", "thread", "output_config"]),
    ],
)  # fmt: skip
def test_null_means_the_default(
    http: httpx.Client, path: str, body: dict, names: list[str]
) -> None:
    answer = http.post(path, json=body | dict.fromkeys(names))
    assert answer.status_code == 200, answer.text
    assert "x-ignored-fields" not in answer.headers
    required = next(iter(body))
    assert (
        "must be a " in check_error(http.post(path, json=body | {required: None}), 400)["message"]
    )


def test_max_tokens_null_means_16_in_completions(http: httpx.Client) -> None:
    answer = http.post(COMPLETIONS, json=GOOD | {"max_tokens": None})
    assert answer.json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("path", "changes", "message"),
    [
        (COMPLETIONS, {"max_tokens": "abc"}, 'max_tokens must be an integer; got "abc".'),
        (COMPLETIONS, {"max_tokens": 1.5}, "max_tokens must be an integer; got 1.5."),
        (COMPLETIONS, {"temperature": []}, "temperature must be a number; got a list of 0."),
        (COMPLETIONS, {"echo": "maybe"}, 'echo must be true or false; got "maybe".'),
        (COMPLETIONS, {"logit_bias": 3}, "logit_bias must be an object; got 3."),
        (CHAT, {"messages": {}}, "messages must be a list; got an object."),
        (CHAT, {"messages": [3]}, "messages[0] must be an object; got 3."),
        ("/v1/responses", {"input": "x", "store": 7}, "store must be true or false; got 7."),
    ],
)
def test_wrong_values_are_shown(
    http: httpx.Client, path: str, changes: dict[str, object], message: str
) -> None:
    given = {COMPLETIONS: {"prompt": "a"}, CHAT: {"messages": HELLO}}.get(path, {})
    answer = http.post(path, content=json.dumps(given | changes), headers=JSON)
    assert check_error(answer, 400)["message"] == message


def test_messages_name_ranges_in_whole_numbers(http: httpx.Client) -> None:
    message = check_error(http.post(COMPLETIONS, json=GOOD | {"max_tokens": 0}), 400)["message"]
    assert message == "max_tokens must be at least 1; got 0."
    answer = http.post(COMPLETIONS, json=GOOD | {"presence_penalty": 3})
    message = check_error(answer, 400)["message"]
    assert message == "presence_penalty must be between -2 and 2; got 3.0."


WRONG = {
    "model": [5, ["tiny"]],
    "temperature": ["hot", -0.1, 2.1, [1]],
    "top_p": [0, -1, 1.1, "x"],
    "top_k": [-2, 2**31, 2**63, 2**70, 1.5],
    "min_p": [-0.1, 1.1],
    "n": [0, -1, 129, "many", 1.5],
    "max_tokens": [0, -1, "x", 1.5, 2**70],
    "min_tokens": [-1, 17, 2**70],
    "stop": [5, "", [""], ["a"] * 65, "x" * 1025, [None], "\ud800"],
    "stop_token_ids": [[262], [-1], ["a"], 3],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, 2.1],
    "repetition_penalty": [0, -1],
    "logit_bias": [{"a": 1}, {"262": 1}, {"-1": 1}, {"1": 101}, {"1": "x"}, [1]],
    "logprobs": [-1, 101],
    "seed": [2**63, -(2**63) - 1, "x"],
    "priority": [2**31, 2**70, "x"],
    "stream": ["perhaps", 5],
    "user": [5],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in WRONG.items() for value in values],
    ids=lambda v: ascii(v)[:20],
)
def test_a_wrong_value_is_refused_by_parameter_name(
    http: httpx.Client, name: str, value: object
) -> None:
    body = json.dumps({"prompt": "a", name: value})
    answer = http.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    assert check_error(answer, 400)["param"].split("[")[0] == name


@pytest.mark.parametrize(
    "prompt",
    [
        "", [], [[]], ["a", ""], [1, []], [1.5], [True], ["a", 1], {"a": 1}, 5, None, [262], [-1],
        [1, 2**70], "\ud800",
    ],
    ids=lambda v: ascii(v)[:20],
)  # fmt: skip
def test_an_invalid_prompt_is_refused(http: httpx.Client, prompt: object) -> None:
    body = json.dumps({"prompt": prompt})
    answer = http.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    param = check_error(answer, 400)["param"]
    assert param.split("[")[0] == "prompt"


def test_one_bad_prompt_among_several_refuses_all(server: Server) -> None:
    check_error(
        server.http.post(COMPLETIONS, json={"prompt": ["good", "good", "x" * CONTEXT]}), 400
    )
    until(server.is_idle)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "Hello",
        [5],
        [{}],
        [{"content": "no role"}],
        [{"role": "", "content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": "\udfff"}],
    ],
    ids=lambda v: ascii(v)[:30],
)
def test_invalid_messages_are_refused(http: httpx.Client, messages: object) -> None:
    body = json.dumps({"messages": messages})
    answer = http.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert check_error(answer, 400)["param"].startswith("messages")


# ---- unsupported options


@pytest.mark.parametrize(
    ("path", "option"),
    [
        (COMPLETIONS, {"suffix": "end"}),
        (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}),
        (COMPLETIONS, {"stream_options": {"include_usage": True}}),
        (CHAT, {"tool_choice": "auto"}),
        (CHAT, {"top_logprobs": 2}),
        (CHAT, {"stream_options": {"include_usage": True}}),
        (CHAT, {"chat_template_kwargs": {"tokenize": True}}),
        (CHAT, {"chat_template_kwargs": {"tools": [{"a": 1}]}}),
        (CHAT, {"chat_template_kwargs": {"self": 1}}),
        (CHAT, {"chat_template_kwargs": {"messages": []}}),
        (CHAT, {"chat_template_kwargs": {"x": "\ud800"}}),
        (CHAT, {"chat_template_kwargs": {"tools": 5}}),
    ],
    ids=lambda v: ascii(v)[:40],
)
def test_an_unsupported_option_is_refused_by_name(
    http: httpx.Client, path: str, option: dict[str, object]
) -> None:
    body = {"prompt": "a"} if path == COMPLETIONS else {"messages": HELLO}
    content = json.dumps(body | {"max_tokens": 2} | option)
    answer = http.post(path, content=content, headers={"Content-Type": "application/json"})
    error = check_error(answer, 400)
    name = next(reversed(option))
    assert name in f"{error['param']} {error['message']}" or error["param"] == "messages"


# ---- models


def test_an_unknown_model_is_404_on_every_route(client: openai.OpenAI, http: httpx.Client) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-17", prompt="a")
    assert caught.value.code == "model_not_found"
    assert "gpt-17" in caught.value.message
    assert "tiny" in caught.value.message
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-17", messages=HELLO)
    assert check_error(http.get("/v1/models/gpt-17"), 404)["code"] == "model_not_found"
    check_error(http.post(COMPLETIONS, json={"model": "elsewhere/tiny", "prompt": "a"}), 404)


def test_an_error_of_the_chat_template_is_400(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="no such role"):
        client.chat.completions.create(model="tiny", messages=[{"role": "robot", "content": "x"}])


@pytest.fixture(scope="module")
def bare(bare_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a model without a tokenizer, behind a key."""
    server = LocalServer(
        str(bare_model), "--api-key", "sesame", cwd=tmp_path_factory.mktemp("bare")
    )
    server.http.headers["Authorization"] = "Bearer sesame"
    yield server
    server.stop()


def test_a_model_without_a_tokenizer_takes_token_ids_only(
    bare: Server, reference: Reference
) -> None:
    error = check_error(bare.http.post(COMPLETIONS, json={"prompt": "text"}), 400)
    assert "token ids" in error["message"]
    check_error(bare.http.post(CHAT, json={"messages": HELLO}), 400)
    prompt = reference.tokenizer.encode("The sea is")
    body = GOOD | {"prompt": prompt, "logprobs": 0, "max_tokens": 4}
    answer = bare.http.post(COMPLETIONS, json=body).json()
    assert answer["usage"]["completion_tokens"] == 4
    assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == 4


def test_without_a_chat_template_chat_is_refused(base: Server) -> None:
    error = check_error(base.http.post(CHAT, json={"messages": HELLO}), 400)
    assert error["code"] == "no_chat_template"
    assert COMPLETIONS in error["message"]
    assert COMPLETIONS in base.curl  # the card does not propose a chat either
    assert base.http.post(COMPLETIONS, json=GOOD).status_code == 200


# ---- the key


def test_a_missing_or_wrong_key_is_401(bare: Server) -> None:
    for given in (None, "Bearer wrong", "sesame", "Basic sesame", "Bearer sesame2", "Bearer"):
        header = {"Authorization": given} if given else {}
        with httpx.Client(base_url=bare.url, headers=header, timeout=60) as http:
            for answer in (http.get("/v1/models"), http.post(COMPLETIONS, json={"prompt": [1]})):
                assert check_error(answer, 401)["code"] == "invalid_api_key"
    with bare.openai("wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_the_right_key_is_accepted(bare: Server) -> None:
    with bare.openai("sesame") as client:
        assert client.completions.create(model="", prompt=[1, 2], max_tokens=2).choices


@pytest.mark.parametrize("path", ["/health", "/metrics", "/version"])
def test_probes_need_no_key(bare: Server, path: str) -> None:
    assert httpx.get(f"{bare.url}{path}", timeout=60).status_code == 200


def test_the_key_is_not_in_the_log(bare: Server) -> None:
    assert "sesame" not in bare.stderr


# ---- invalid JSON


@pytest.mark.parametrize(
    "path", [COMPLETIONS, CHAT, "/v1/responses", "/v1/messages", "/v1/embeddings"]
)
@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"prompt": "x"', "not valid JSON: Expecting ',' delimiter at character 15."),
        (b'{"prompt": "a\nb"}', "not valid JSON: Invalid control character at character 14."),
        (b'{"prompt": "\xe9"}', "not valid UTF-8: 0xe9 at byte 13."),
        (b'{"seed": ' + b"1" * 5000 + b"}", "a number of more than 4,300 digits."),
    ],
)  # fmt: skip
def test_messages_name_the_position_in_invalid_json(
    http: httpx.Client, path: str, body: bytes, says: str
) -> None:
    answer = http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert check_error(answer, 400)["message"].endswith(says)


# ---- routes and identity


def test_an_unknown_route_is_404_and_a_wrong_method_405(http: httpx.Client) -> None:
    assert "/v1/nothing" in check_error(http.get("/v1/nothing"), 404)["message"]
    answer = http.get(COMPLETIONS)
    check_error(answer, 405)
    assert answer.headers["allow"] == "POST"
    answer = http.delete("/v1/models")
    check_error(answer, 405)
    assert answer.headers["allow"] == "GET, HEAD"
    check_error(http.post(f"{COMPLETIONS}/", json={"prompt": "a"}), 404)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_request_id_is_part_of_the_response_s(http: httpx.Client, path: str) -> None:
    body = {"prompt": "a"} if path == COMPLETIONS else {"messages": HELLO}
    answer = http.post(
        path, json=body | {"max_tokens": 2}, headers={"X-Request-Id": "order-66.a:b"}
    )
    assert answer.headers["x-request-id"] == "order-66.a:b"
    assert answer.json()["id"].endswith("-order-66.a:b")
    refused = http.post(path, json={}, headers={"X-Request-Id": "order-67"})
    assert refused.headers["x-request-id"] == "order-67"


def test_without_a_valid_request_id_each_response_has_a_new_one(http: httpx.Client) -> None:
    given = [
        http.get("/version", headers=h).headers["x-request-id"]
        for h in (
            {},
            {},
            {"X-Request-Id": "a b"},
            {"X-Request-Id": "x" * 200},
            {"X-Request-Id": b"a\xe9b"},
        )
    ]
    assert len(set(given)) == 5
    assert all(len(id) == 32 for id in given)


def test_requests_with_the_same_id_do_not_interfere(server: Server, reference: Reference) -> None:
    """A proxy's retry has the id of the first request, which may still be running."""
    prompts = ["first", "second", "third", "fourth"]

    def text(prompt: str) -> str:
        body = GOOD | {"prompt": prompt, "max_tokens": 48}
        with httpx.Client(
            base_url=server.url, timeout=60, headers={"X-Request-Id": "same"}
        ) as http:
            return http.post(COMPLETIONS, json=body).json()["choices"][0]["text"]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(text, prompts)) == reference.texts(prompts, 48)
    until(server.is_idle)


def test_cross_origin_preflights_are_refused(http: httpx.Client) -> None:
    answer = http.options(
        COMPLETIONS,
        headers={"Origin": "https://elsewhere.example", "Access-Control-Request-Method": "POST"},
    )
    assert answer.status_code == 405
    assert "access-control-allow-origin" not in answer.headers


def test_after_many_bad_requests_a_good_one_works(server: Server, reference: Reference) -> None:
    bad = [
        lambda http: http.post(
            COMPLETIONS, content=b"{", headers={"Content-Type": "application/json"}
        ),
        lambda http: http.post(COMPLETIONS, json={"prompt": [10**6]}),
        lambda http: http.post(COMPLETIONS, json={"prompt": "x" * CONTEXT}),
        lambda http: http.post(COMPLETIONS, json={"prompt": "x", "n": 0}),
        lambda http: http.post(CHAT, json={"messages": [{"role": "robot"}]}),
        lambda http: http.post(CHAT, json={"messages": HELLO, "model": "none"}),
        lambda http: http.get("/v1/nowhere"),
    ]
    with httpx.Client(base_url=server.url, timeout=60) as http, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: bad[i % len(bad)](http), range(280)))
    assert {a.status_code for a in answers} == {400, 404}
    good = server.http.post(COMPLETIONS, json=GOOD).json()
    assert good["choices"][0]["text"] == reference.text("The sea is", 8)
    until(server.is_idle)
