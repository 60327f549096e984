"""Ollama's API with its official client, and with curl's bodies."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
from ollama import _types as sent
from pydantic import BaseModel

from tests.api.conftest import CONTEXT, Reference
from tests.local import LocalServer
from tests.models.gguf_models import write_model
from tests.server import Server, until
from toolkit.api.http.body_fields import Body
from toolkit.api.ollama.embed import OllamaEmbeddingRequest, OllamaEmbedRequest
from toolkit.api.ollama.models import ShowRequest
from toolkit.api.ollama.options import ModelOptions
from toolkit.api.ollama.requests import OllamaChatRequest, OllamaGenerateRequest, OllamaMessage

QUESTION = [{"role": "user", "content": "What is a KV cache?"}]
GREEDY = {"temperature": 0, "num_predict": 12}
FORM = {"Content-Type": "application/x-www-form-urlencoded"}  # what curl -d sends
COUNTS = (
    "total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count",
    "eval_duration",
)  # fmt: skip


@pytest.fixture
def client(server: Server) -> Iterator[ollama.Client]:
    with ollama.Client(server.url) as client:
        yield client


@pytest.fixture(scope="module")
def expected(reference: Reference) -> str:
    return reference.text(reference.conversation(*QUESTION), 12)


def lines(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = http.post(path, content=json.dumps(body), headers=FORM)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def error(http: httpx.Client, path: str, **body: Any) -> tuple[int, str]:
    answer = http.post(path, content=json.dumps(body))
    assert answer.json().keys() == {"error"}
    return answer.status_code, answer.json()["error"]


# ---- answers


def test_chat_equals_transformers(
    client: ollama.Client, reference: Reference, expected: str
) -> None:
    answer = client.chat("tiny:latest", QUESTION, options=GREEDY)
    assert (answer.message.role, answer.message.content) == ("assistant", expected)
    assert (answer.model, answer.done, answer.done_reason) == ("tiny", True, "length")
    prompt = reference.tokenizer.encode(reference.conversation(*QUESTION))
    assert (answer.prompt_eval_count, answer.eval_count) == (len(prompt), 12)
    assert all(getattr(answer, name) > 0 for name in COUNTS)
    parts = answer.load_duration + answer.prompt_eval_duration + answer.eval_duration
    assert parts <= answer.total_duration + 3
    assert (answer.created_at or "").endswith("Z")


def test_stream_ends_with_the_counts(client: ollama.Client, expected: str) -> None:
    *parts, last = client.chat("tiny", QUESTION, stream=True, options=GREEDY)
    assert "".join(part.message.content or "" for part in parts) == expected
    assert not any(part.done or part.eval_count for part in parts)
    assert (last.done, last.done_reason, last.eval_count) == (True, "length", 12)


async def test_async_client_streams(server: Server, expected: str) -> None:
    async with ollama.AsyncClient(server.url) as client:
        stream = await client.chat("tiny", QUESTION, stream=True, options=GREEDY)
        assert "".join([part.message.content async for part in stream]) == expected
    until(server.is_idle)


def test_stream_of_lines_is_the_default(http: httpx.Client, expected: str) -> None:
    """Bodies are JSON, whatever the type that curl sends."""
    *parts, last = lines(http, "/api/chat", model="tiny", messages=QUESTION, options=GREEDY)
    assert "".join(part["message"]["content"] for part in parts) == expected
    assert last["message"] == {"role": "assistant", "content": ""}
    assert {"model", "created_at", "message", "done", "done_reason", *COUNTS} == last.keys()
    for headers in ({}, FORM, {"Content-Type": "text/plain"}):
        body = {"prompt": "x", "options": GREEDY}
        answer = http.post("/api/generate", content=json.dumps(body), headers=headers)
        assert answer.headers["content-type"] == "application/x-ndjson"


@pytest.mark.parametrize("stream", [True, False])
def test_generate_uses_the_template(client: ollama.Client, expected: str, stream: bool) -> None:
    [question] = QUESTION
    found = client.generate("tiny", question["content"], options=GREEDY, stream=stream)
    parts = list(found) if stream else [found]
    assert "".join(part.response for part in parts) == expected
    assert (parts[-1].done_reason, parts[-1].eval_count) == ("length", 12)


def test_system_message_comes_first(client: ollama.Client) -> None:
    system = {"role": "system", "content": "Be brief."}
    messages = [system, {"role": "user", "content": "Hi"}]
    answer = client.generate("tiny", "Hi", system="Be brief.", options=GREEDY)
    assert answer.response == client.chat("tiny", messages, options=GREEDY).message.content


def test_raw_prompt_is_continued(client: ollama.Client, reference: Reference) -> None:
    answer = client.generate("tiny", "The sea is", raw=True, options=GREEDY)
    assert answer.response == reference.text("The sea is", 12)


def test_prompt_without_chat_template_is_continued(base: Server) -> None:
    body = {"prompt": "The sea", "options": GREEDY | {"num_predict": 3}}
    raw, plain = (
        [one["response"] for one in lines(base.http, "/api/generate", raw=raw, **body)]
        for raw in (True, False)
    )
    assert "".join(raw) == "".join(plain)
    status, message = error(base.http, "/api/generate", system="Be brief.", **body)
    assert (status, "chat template" in message) == (400, True)


def test_assistant_message_at_the_end_is_continued(
    client: ollama.Client, reference: Reference
) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "It is"}]
    answer = client.chat("tiny", messages, options=GREEDY)
    prompt = reference.conversation(*messages).removesuffix("<|end|><|assistant|>")
    assert answer.message.content == reference.text(prompt, 12)


@pytest.mark.parametrize(
    ("path", "empty", "content"),
    [
        ("/api/chat", {"messages": []}, {"message": {"role": "assistant", "content": ""}}),
        ("/api/chat", {}, {"message": {"role": "assistant", "content": ""}}),
        ("/api/generate", {}, {"response": ""}),
        ("/api/generate", {"prompt": ""}, {"response": ""}),
    ],
)
def test_empty_prompt_loads_or_unloads(
    http: httpx.Client, path: str, empty: dict[str, Any], content: dict[str, Any]
) -> None:
    for keep_alive, reason in (
        (None, "load"), ("5m", "load"), (-1, "load"), ("0.5s", "load"),
        (0, "unload"), ("0", "unload"), ("0s", "unload"), ("0m", "unload"),
    ):  # fmt: skip
        [found] = lines(http, path, model="tiny", keep_alive=keep_alive, **empty)
        assert found | {"created_at": ""} == {
            "model": "tiny", "created_at": "", "done": True, "done_reason": reason, **content
        }  # fmt: skip


# ---- fields


def params(defaults: dict[str, Any] | None = None, **options: Any) -> Any:
    body = OllamaChatRequest(messages=QUESTION, options=options)
    return body.to_conversation(defaults or {}).params


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"temperature": 0.5}, {"temperature": 0.5}),
        ({"top_k": 7}, {"top_k": 7}),
        ({"top_p": 0.5}, {"top_p": 0.5}),
        ({"min_p": 0.1}, {"min_p": 0.1}),
        ({"seed": 3}, {"seed": 3}),
        ({"seed": -1}, {"seed": None}),
        ({"stop": "x"}, {"stop": ["x"]}),
        ({"stop": ["x", "y"]}, {"stop": ["x", "y"]}),
        ({"num_predict": 9}, {"max_tokens": 9}),
        ({"num_predict": -1}, {"max_tokens": None}),
        ({"num_predict": -2}, {"max_tokens": None}),
        ({}, {"max_tokens": None, "temperature": 1.0}),
        ({"presence_penalty": 0.5}, {"presence_penalty": 0.5}),
        ({"frequency_penalty": 0.5}, {"frequency_penalty": 0.5}),
        ({"repeat_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"repeat_penalty": 1.1, "repeat_last_n": -1}, {"repetition_penalty": 1.1}),
        (
            {"repeat_penalty": 1.1, "presence_penalty": 1, "repeat_last_n": 0},
            {"repetition_penalty": 1.0, "presence_penalty": 0.0},
        ),
        ({"repeat_penalty": 1.1, "repeat_last_n": 64}, {"penalty_window": 64}),
        ({"mirostat": 0, "tfs_z": 1, "typical_p": 1.0}, {"temperature": 1.0}),
    ],
)
def test_options_become_sampling_parameters(options: dict[str, Any], found: dict[str, Any]) -> None:
    made = params(**options)
    assert {name: getattr(made, name) for name in found} == found


def test_options_without_effect_are_accepted(http: httpx.Client) -> None:
    names = (
        "num_keep", "num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram",
        "f16_kv", "use_mmap", "use_mlock", "logits_all", "vocab_only", "embedding_only",
        "penalize_newline", "mirostat_tau", "mirostat_eta",
    )  # fmt: skip
    options = dict.fromkeys(names, 1) | {"num_predict": 1}
    answer = http.post("/api/chat", json={"messages": QUESTION, "options": options})
    assert answer.status_code == 200, answer.text
    assert "x-ignored-fields" not in answer.headers
    answer = http.post("/api/generate", json={"prompt": "x", "options": {"novel": 1} | options})
    assert answer.headers["x-ignored-fields"] == "options.novel"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mirostat": 2}, "mirostat 2 is not supported"),
        ({"tfs_z": 0.5}, "tfs_z 0.5 is not supported"),
        ({"typical_p": 0.7}, "typical_p 0.7 is not supported"),
        ({"repeat_last_n": -2}, "options.repeat_last_n must be"),
        ({"top_p": 2}, "options.top_p must be between 0 and 1"),
        ({"num_predict": 0}, "options.num_predict must be at least 1"),
        ({"repeat_penalty": 0}, "options.repeat_penalty must be"),
        ({"temperature": 3}, "temperature must be from 0 to 2"),
        ({"stop": [1]}, "options: stop must be a string; got 1"),
        (3, "options must be an object; got 3"),
        ({"top_k": "x"}, 'options: top_k must be an integer; got "x"'),
    ],
)
def test_options_are_refused_with_a_reason(http: httpx.Client, options: Any, words: str) -> None:
    status, message = error(http, "/api/chat", messages=QUESTION, options=options)
    assert status == 400
    assert words in message


def test_answer_ends_with_the_context(http: httpx.Client) -> None:
    options = {"num_predict": 2 * CONTEXT, "temperature": 0}
    body = {"prompt": "ab" * (CONTEXT // 2 - 4), "raw": True, "stream": False, "options": options}
    answer = http.post("/api/generate", json=body).json()
    assert answer["prompt_eval_count"] + answer["eval_count"] == CONTEXT
    assert answer["done_reason"] == "length"


def test_log_probabilities_are_those_of_openai_s_chats(
    client: ollama.Client, server: Server
) -> None:
    with server.openai() as openai:
        asked = openai.chat.completions.create(
            model="tiny", messages=QUESTION, max_tokens=12, temperature=0, logprobs=True,
            top_logprobs=2,
        )  # fmt: skip
    expected = [one.model_dump() for one in asked.choices[0].logprobs.content]
    given = {"options": GREEDY, "logprobs": True, "top_logprobs": 2}
    answer = client.chat("tiny", QUESTION, **given)
    found = [one.model_dump() for one in answer.logprobs]
    names = ("token", "logprob", "top_logprobs")
    assert [{k: one[k] for k in names[:2]} for one in found] == [
        {k: one[k] for k in names[:2]} for one in expected
    ]
    assert [[top["token"] for top in one["top_logprobs"]] for one in found] == [
        [top["token"] for top in one["top_logprobs"]] for one in expected
    ]
    parts = client.chat("tiny", QUESTION, stream=True, **given)
    assert [one for part in parts for one in part.logprobs or ()] == list(answer.logprobs)
    done = client.generate("tiny", QUESTION[0]["content"], options=GREEDY, logprobs=True)
    assert len(done.logprobs) == 12
    assert not done.logprobs[0].top_logprobs


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"suffix": "x"}, "suffix is not supported"),
        ({"template": "{{ .Prompt }}"}, "template is not supported"),
        ({"context": [1, 2]}, "context is not supported"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs to be true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"width": 64}, "width is not supported"),
        ({"raw": True, "system": "x"}, "system cannot be used with raw"),
        ({"raw": True, "images": ["x"]}, "images cannot be used with raw"),
        ({"images": ["iVBORw0KGgo="]}, "reads text alone"),
        ({"format": "xml"}, "format must be 'json' or a JSON schema"),
        ({"format": {"type": "strange"}}, "format"),
        ({"think": "hard"}, "think"),
        ({"prompt": 1}, "prompt must be a string; got 1"),
        ({"prompt": "x" * 9 * CONTEXT}, "maximum context length"),
    ],
)
def test_fields_are_refused_with_a_reason(
    http: httpx.Client, body: dict[str, Any], words: str
) -> None:
    status, message = error(http, "/api/generate", **{"prompt": "x"} | body)
    assert status == 400
    assert words in message


def test_fields_with_their_defaults_are_accepted(http: httpx.Client) -> None:
    harmless: dict[str, Any] = {
        "suffix": "", "template": "", "context": [], "system": "", "format": "", "images": [],
        "logprobs": False, "raw": False, "think": False, "truncate": True, "shift": True,
        "keep_alive": "5m", "options": {"num_predict": 1},
    }  # fmt: skip
    answer = http.post("/api/generate", json={"prompt": "x"} | harmless)
    assert answer.status_code == 200, answer.text
    assert "x-ignored-fields" not in answer.headers


def test_format_constrains_the_answer(client: ollama.Client) -> None:
    schema = {"type": "object", "properties": {"dry": {"enum": [True]}}, "required": ["dry"]}
    schema |= {"additionalProperties": False}
    options = {"num_predict": 60, "seed": 1}
    answer = client.chat("tiny", QUESTION, format=schema, options=options)
    assert json.loads(answer.message.content) == {"dry": True}
    assert answer.done_reason == "stop"
    answer = client.generate("tiny", "x", format="json", options=GREEDY)
    assert answer.response.startswith("{")
    status, message = error(
        client._client, "/api/chat", format="json", messages=[{"role": "assistant", "content": "x"}]
    )
    assert (status, "last message" in message) == (400, True)


def test_stop_ends_the_answer(client: ollama.Client, expected: str) -> None:
    stop = next(c for c in expected[2:] if c.isascii() and c not in expected[:2])
    answer = client.chat("tiny", QUESTION, options=GREEDY | {"stop": [stop]})
    assert answer.message.content == expected[: expected.index(stop)]
    assert answer.done_reason == "stop"


@pytest.mark.parametrize(
    ("think", "options"),
    [
        (None, {}),
        (False, {"enable_thinking": False}),
        (True, {"enable_thinking": True}),
        ("high", {"enable_thinking": True, "reasoning_effort": "high"}),
    ],
)
def test_think_reaches_the_template(think: Any, options: dict[str, Any]) -> None:
    for body in (
        OllamaChatRequest(messages=QUESTION, think=think),
        OllamaGenerateRequest(prompt="x", think=think),
    ):
        ends = {"add_generation_prompt": True, "continue_final_message": False}
        assert body.to_conversation({}).options == options | ends


def test_calls_and_results_get_matching_ids() -> None:
    def call(name: str, **more: str) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {"a": 1}}} | more

    messages = [
        *QUESTION,
        {
            "role": "assistant", "thinking": "Hm.",
            "tool_calls": [call("one"), call("two"), call("three", id="given")],
        },
        {"role": "tool", "tool_name": "two", "content": "2"},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "3", "tool_call_id": "given"},
        {"role": "tool", "content": "4"},
    ]  # fmt: skip
    _, asked, *results = OllamaChatRequest(messages=messages).to_conversation({}).messages
    assert asked["reasoning_content"] == "Hm."
    assert [one["id"] for one in asked["tool_calls"]] == ["call00001", "call00002", "given"]
    assert asked["tool_calls"][0]["function"] == {"name": "one", "arguments": {"a": 1}}
    assert [(one.get("tool_call_id"), one.get("name")) for one in results] == [
        ("call00002", "two"), ("call00001", "one"), ("given", "three"), (None, None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "body"),
    [
        (sent.ChatRequest, OllamaChatRequest),
        (sent.GenerateRequest, OllamaGenerateRequest),
        (sent.EmbedRequest, OllamaEmbedRequest),
        (sent.EmbeddingsRequest, OllamaEmbeddingRequest),
        (sent.ShowRequest, ShowRequest),
        (sent.Options, ModelOptions),
        (sent.Message, OllamaMessage),
    ],
)
def test_every_field_of_the_client_is_known(given: type[BaseModel], body: type[Body]) -> None:
    assert given.model_fields.keys() <= body.model_fields.keys() | body.refused_fields.keys()


# ---- tools and thinking

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if tools %}<tool_call>{% elif enable_thinking %}<think>{% endif %}"
)
"""Begins a call or the reasoning for the model, whose weights are random."""


@pytest.fixture(scope="module")
def caller(
    reference: Reference, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ollama.Client]:
    """Client of a server of a GGUF file."""
    file = tmp_path_factory.mktemp("gguf") / "tiny-llama.gguf"
    more = {"general.file_type": 15, "llama.context_length": CONTEXT}
    write_model(file, reference.model, "llama", **more)
    options = ("--chat-template", TEMPLATE, "--reasoning-parser", "qwen3", "--api-key", "k")
    served = LocalServer(
        str(file), "--tokenizer", str(model), *options, "--num-gpu-blocks-override", "1024",
        cwd=tmp_path_factory.mktemp("calls"),
    )  # fmt: skip
    with ollama.Client(served.url, headers={"Authorization": "Bearer k"}) as client:
        yield client
    served.stop()


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"days": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["days"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("stream", [True, False])
def test_calls_have_objects_as_arguments(caller: ollama.Client, stream: bool) -> None:
    """With a format, the grammar allows a call or the format. The template begins a call."""
    body = {"messages": QUESTION, "tools": [WEATHER], "format": "json", "stream": stream}
    body["options"] = {"num_predict": 100, "seed": 1}
    found = lines(caller._client, "/api/chat", **body)
    parts = [ollama.ChatResponse(**one) for one in found]
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert calls
    assert {call.function.name for call in calls} == {"weather"}
    assert all(0 <= call.function.arguments["days"] <= 99 for call in calls[:1])
    answered = [*QUESTION, parts[0].message, {"role": "tool", "content": "dry"}]
    assert caller.chat("tiny-llama", answered, options=GREEDY).done


def test_functions_of_the_client_are_tools(caller: ollama.Client) -> None:
    def weather(days: int) -> str:
        """Forecast the weather.

        Args:
            days: number of days
        """
        return f"dry for {days} days"

    options = {"num_predict": 1}
    assert caller.chat("tiny-llama", QUESTION, tools=[weather], options=options).done


@pytest.mark.parametrize("stream", [True, False])
def test_reasoning_is_thinking(caller: ollama.Client, stream: bool) -> None:
    for answer in (
        caller.chat("tiny-llama", QUESTION, think=True, options=GREEDY, stream=stream),
        caller.generate("tiny-llama", "Hi", think=True, options=GREEDY, stream=stream),
    ):
        parts = list(answer) if stream else [answer]
        texts = [part.get("message", part) for part in parts]
        assert "".join(one.thinking or "" for one in texts)
        assert not any(one.get("content") or one.get("response") for one in texts)
    plain = caller.chat("tiny-llama", QUESTION, think=False, options=GREEDY)
    assert plain.message.content
    assert not plain.message.thinking


def test_keys_are_checked(caller: ollama.Client) -> None:
    url = caller._client.base_url
    for path in ("/api/tags", "/api/version"):
        assert httpx.get(url.join(path)).status_code == 401
    answer = httpx.post(url.join("/api/chat"), json={"messages": QUESTION})
    assert answer.status_code == 401
    assert "API key" in answer.json()["error"]


# ---- models


def test_models_are_listed(client: ollama.Client) -> None:
    listed, loaded = client.list().models, client.ps().models
    for models in (listed, loaded):
        assert [one.model for one in models] == ["tiny:latest", "org/other/name:latest"]
        for one in models:
            assert one.size
            assert len(one.digest or "") == 64
            assert one.details is not None
            assert (one.details.format, one.details.family) == ("safetensors", "llama")
    assert listed[0].modified_at is not None
    assert (loaded[0].context_length, loaded[0].size_vram) == (CONTEXT, 0)
    for one in listed:
        assert client.generate(one.model, "", keep_alive=60).done_reason == "load"


def test_gguf_file_has_its_own_quantization(caller: ollama.Client) -> None:
    for details in (caller.list().models[0].details, caller.show("tiny-llama").details):
        assert details is not None
        assert (details.format, details.quantization_level) == ("gguf", "Q4_K_M")


def test_model_is_shown(client: ollama.Client, caller: ollama.Client, http: httpx.Client) -> None:
    shown = client.show("tiny")
    assert shown.capabilities == ["completion", "tools"]
    assert shown.modelinfo["general.architecture"] == "llama"
    assert shown.modelinfo["llama.context_length"] == CONTEXT
    assert "<|assistant|>" in shown.template
    assert caller.show("tiny-llama").capabilities == ["completion", "tools", "thinking"]
    for body in ({"name": "tiny:latest", "verbose": True}, {}):
        assert http.post("/api/show", content=json.dumps(body)).status_code == 200


def test_version_has_three_numbers(http: httpx.Client) -> None:
    assert http.head("/").status_code == 200
    assert len(http.get("/api/version").json()["version"].split(".")) == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda client: client.pull("gemma3"),
        lambda client: list(client.pull("gemma3", stream=True)),
        lambda client: client.push("tiny"),
        lambda client: client.create("new", from_="tiny"),
        lambda client: client.copy("tiny", "other"),
        lambda client: client.delete("tiny"),
    ],
)
def test_models_cannot_be_changed(
    client: ollama.Client, change: Callable[[ollama.Client], Any]
) -> None:
    with pytest.raises(ollama.ResponseError, match="when the server starts") as failure:
        change(client)
    assert failure.value.status_code == 400


def test_served_model_needs_no_download(client: ollama.Client) -> None:
    assert client.pull("tiny:latest").status == "success"
    assert [one.status for one in client.pull("tiny", stream=True)] == ["success"]


# ---- errors, limits, clients that leave


def test_unknown_model_is_not_found(client: ollama.Client, http: httpx.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="tiny") as failure:
        client.chat("none:latest", QUESTION)
    assert failure.value.status_code == 404
    assert error(http, "/api/show", model="none")[0] == 404
    assert error(http, "/api/nowhere")[0] == 404
    assert http.get("/api/chat").json().keys() == {"error"}


@pytest.mark.parametrize("body", ["", "{", "[]", '"x"', "model=tiny", "\xff"])
def test_invalid_body_is_refused(http: httpx.Client, body: str) -> None:
    answer = http.post("/api/generate", content=body.encode("latin-1"), headers=FORM)
    assert answer.status_code == 400
    assert answer.json().keys() == {"error"}


def test_limits_hold_and_clients_can_leave(start_local: Callable[..., Server], model: Path) -> None:
    full = start_local("--max-requests-per-key", "1", model=model)
    body = {"prompt": "x", "raw": True, "options": {"num_predict": 200, "temperature": 0}}
    with full.slowly(), full.http.stream("POST", "/api/generate", json=body) as stream:
        found = stream.iter_lines()
        next(found)
        answer = httpx.post(f"{full.url}/api/generate", json=body)
        assert answer.status_code == 429
        assert answer.headers["retry-after"]
        assert "open requests" in answer.json()["error"]
    until(full.is_idle)  # the client has left


def test_error_ends_the_stream(start_local: Callable[..., Server], model: Path) -> None:
    hasty = start_local("--request-timeout", "0.5", model=model)
    with hasty.slowly(), ollama.Client(hasty.url) as client:
        stream = client.chat("tiny-llama", QUESTION, stream=True)
        with pytest.raises(ollama.ResponseError, match=r"within 0\.5 s"):
            list(stream)
    until(hasty.is_idle)


def test_requests_are_counted(server: Server) -> None:
    name = "http_requests_total"
    before = server.metric(name, handler="/api/chat")
    lines(server.http, "/api/chat", messages=QUESTION, options={"num_predict": 1})
    until(lambda: server.metric(name, handler="/api/chat") == before + 1)


def test_ended_request_reports_abort(server: Server) -> None:
    body = {"prompt": "x", "raw": True, "options": {"temperature": 0}}
    with server.slowly(), server.http.stream("POST", "/api/generate", json=body) as stream:
        found = stream.iter_lines()
        next(found)
        id = stream.headers["x-request-id"]
        httpx.delete(f"{server.url}/tk/requests/ollama-{id}").raise_for_status()
        last = json.loads([*found][-1])
    assert (last["done"], last["done_reason"]) == (True, "abort")
