"""One server with an installed package that has every kind of plug-in."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import checkpoints
from tests.local import LocalServer
from tests.plugins.conftest import clear
from tests.server import INSIDE, Client, Server, until
from toolkit.doctor.plugins import check_plugins

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
TEMPLATE = "{% if tools %}tools:{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose `model_type` only the plug-in knows."""
    folder = checkpoints.save(
        checkpoints.make_reference("llama3-gqa"), tmp_path_factory.mktemp("example-model")
    )
    checkpoints.edit_json(
        folder / "config.json", model_type="tk_example", architectures=["TkExampleForCausalLM"]
    )
    return folder


@pytest.fixture(scope="module")
def server(
    example: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    clear()
    served = LocalServer(
        *(str(folder), "--served-model-name", "tiny", "--chat-template", TEMPLATE),
        *("--tool-call-parser", "at", "--reasoning-parser", "notes"),
        *("--logits-processors", "plugged:Failing", "--middleware", "plugged:teapot"),
        "--strict-plugins",
        cwd=tmp_path_factory.mktemp("cwd"),
        PYTHONPATH=os.pathsep.join([str(INSIDE), str(example)]),
    )
    yield served
    served.stop()
    clear()


def script(text: str) -> dict[str, object]:
    """Return fields of a request whose answer begins with a text."""
    ids = checkpoints.make_tokenizer().encode(text, add_special_tokens=False)
    return {"vllm_xargs": {"script": ids}, "max_tokens": len(ids)}


def chat(server: Server, **fields: object) -> dict[str, object]:
    body = {"messages": [{"role": "user", "content": "hi"}]} | fields
    answer = server.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def complete(server: Server, **fields: object) -> dict[str, object]:
    body = {"prompt": "hi", "temperature": 0, "ignore_eos": True} | fields
    return server.http.post("/v1/completions", json=body).json()


def test_model_of_a_plug_in_answers_as_in_transformers(server: Server) -> None:
    prompt = checkpoints.make_tokenizer().encode("hi", add_special_tokens=False)
    expected = checkpoints.greedy(checkpoints.make_reference("llama3-gqa"), prompt, 12)
    found = complete(server, max_tokens=12, return_token_ids=True)["choices"][0]
    assert found["token_ids"] == expected


@pytest.mark.parametrize("stream", [False, True])
def test_processor_and_reasoning_parser_of_a_plug_in(server: Server, stream: bool) -> None:
    fields = script("<notes>hm, no</notes>yes")
    if not stream:
        message = chat(server, **fields)["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm, no", "yes")
        return
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.headers["x-teapot"] == "tiny"
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "hm, no"
    assert "".join(delta.get("content") or "" for delta in deltas) == "yes"


def test_tool_parser_of_a_plug_in_enforces_and_reads_calls(server: Server) -> None:
    required = chat(server, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    [call] = required["message"]["tool_calls"]
    assert call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"])["a"] in (1, 2)
    written = chat(server, tools=[TOOL], **script('so @add {"a": 1}'))
    assert written["message"]["content"] == "so"
    assert written["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


def test_middleware_of_plug_ins_sees_requests_and_answers(server: Server) -> None:
    answer = server.http.get("/v1/models")
    assert float(answer.headers["x-seconds"]) < 60
    assert answer.headers["x-teapot"] == "tiny"
    refused = server.http.get("/v1/models", headers={"x-coffee": "1"})
    assert (refused.status_code, refused.text) == (418, "I'm a teapot")
    assert "x-request-id" in refused.headers


def test_disconnect_ends_a_request_behind_middleware(server: Server) -> None:
    body = {"prompt": "hi", "max_tokens": 150, "ignore_eos": True, "stream": True}
    with server.slowly(), server.http.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
        answer.close()
        until(server.is_idle)


def test_failing_processor_ends_only_its_request(server: Server) -> None:
    with server.slowly():
        other = Client(server, 12)
        until(lambda: other.events)
        failed = complete(server, max_tokens=9, vllm_xargs={"fail_at": 2})
    assert "plugged:Failing" in failed["error"]["message"]
    assert "KeyError: 'no such rule'" in failed["error"]["message"]
    assert other.finish().num_tokens == 12
    assert server.http.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"script": [999]}, "vllm_xargs cannot be used by the logits processor script: script"),
        ({"script": "hi"}, "Expected `array`, got `str` - at `script`"),
        ({"scrpt": [1]}, "vllm_xargs has no argument 'scrpt'. Did you mean script?"),
    ],
)
def test_bad_arguments_are_a_400_that_names_them(
    server: Server, arguments: dict[str, object], message: str
) -> None:
    body = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}]}
    for path in ("completions", "chat/completions"):
        answer = server.http.post(f"/v1/{path}", json=body | {"vllm_xargs": arguments})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert message in error["message"]
        assert error["param"] == "vllm_xargs"


def test_commands_know_the_model(
    example: Path, folder: Path, tk_here: Callable, monkeypatch: pytest.MonkeyPatch, forget
) -> None:
    monkeypatch.syspath_prepend(example)
    shown = json.loads(tk_here("show", str(folder), "--json").stdout)
    assert (shown["architecture"], shown["problem"]) == ("TkExampleForCausalLM", None)
    assert "It fits" in tk_here("serve", str(folder), "--dry-run").stderr


def test_doctor_lists_the_plug_ins(example: Path, monkeypatch: pytest.MonkeyPatch, forget) -> None:
    monkeypatch.syspath_prepend(example)
    monkeypatch.setenv("PYTHONPATH", str(example))
    assert [(one.status, one.text) for one in check_plugins()] == [
        ("pass", "tk_example (tk.models) of tk-example 1.2"),
        ("pass", "script (tk.logits_processors) of tk-example 1.2"),
        ("pass", "at (tk.tool_parsers) of tk-example 1.2"),
        ("pass", "notes (tk.reasoning_parsers) of tk-example 1.2"),
        ("pass", "timing (tk.middleware) of tk-example 1.2"),
    ]
