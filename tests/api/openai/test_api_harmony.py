"""gpt-oss's format in every interface: a model with random weights says what a test dictates."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx
import jsonschema
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import checkpoints
from tests.harmony import TEMPLATE, TOKENS
from tests.local import LocalServer
from tests.server import Server
from toolkit import LLM
from toolkit.api.openai.answer_parts import AnswerParser, AnswerPlan
from toolkit.api.openai.conversation import ChatAnswer
from toolkit.api.openai.replies import PromptTokensDetails, Usage
from toolkit.api.openai.response_events import ResponseBuilder
from toolkit.api.openai.response_request import ResponsesRequest
from toolkit.api.openai.tools import ChatTool
from toolkit.engine.outputs import Delta
from toolkit.sampling.params import SamplingParams
from toolkit.text.harmony import HarmonyFormat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

EXAMPLE = Path(__file__).parents[2] / "plugins" / "example"  # its processor dictates an answer
ASK: Any = [{"role": "user", "content": "Weather?"}]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "Gets it.", "parameters": WEATHER}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
FLAT_TOOLS: Any = [{"type": "function", **FUNCTION}]

NEXT = "<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
ANSWER = f"<|channel|>analysis<|message|>Hm.{NEXT}<|channel|>final<|message|>Cold.<|return|>"
CALLING = (
    f"<|channel|>analysis<|message|>Hm.{NEXT}<|channel|>commentary<|message|>I look.{NEXT}"
    f'<|channel|>analysis<|message|>Oslo?{NEXT}{CALL}{{"city":"Oslo"}}<|call|>'
)


@functools.cache
def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = checkpoints.make_tokenizer()
    tokenizer.add_tokens(list(TOKENS), special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = make_tokenizer()
    folder = tmp_path_factory.mktemp("harmony") / "model"
    checkpoints.save(checkpoints.make_reference("llama3-gqa"), folder, tokenizer=False)
    add_tokens(folder, len(tokenizer))
    checkpoints.edit_json(folder / "config.json", max_position_embeddings=4096)
    tokenizer.save_pretrained(folder)
    return folder


def add_tokens(folder: Path, vocab_size: int) -> None:
    """Give a model small weights for more tokens."""
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        old = weights[name]
        more = torch.randn(vocab_size - len(old), old.shape[1], generator=generator)
        weights[name] = torch.cat([old, 0.02 * more])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    checkpoints.edit_json(folder / "config.json", vocab_size=vocab_size)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Server]:
    server = LocalServer(
        *(str(folder), "--served-model-name", "tiny", "--num-gpu-blocks-override", "2048"),
        *("--logits-processors", "tk_example.processor:Script"),
        cwd=folder.parent,
        PYTHONPATH=str(EXAMPLE),
    )
    yield server
    server.await_health()
    server.stop()


@pytest.fixture(scope="module")
def ai(served: Server) -> Iterator[openai.OpenAI]:
    with served.openai() as client:
        yield client


def script(text: str) -> dict[str, Any]:
    """Return fields of a chat whose answer begins with a text."""
    ids = make_tokenizer().encode(text, add_special_tokens=False)
    return {"vllm_xargs": {"script": ids}}


def chat(served: Server, text: str, **fields: Any) -> Any:
    """Return (choice, the message that a stream's deltas make)."""
    body = {"messages": ASK, "max_tokens": 400, "temperature": 0, **script(text), **fields}
    answer = served.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    joined: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
    reason = None
    with served.http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as stream:
        lines = [line[6:] for line in stream.iter_lines() if line.startswith("data: {")]
    for one in (json.loads(line)["choices"][0] for line in lines):
        reason = one["finish_reason"] or reason
        for name in ("content", "reasoning_content"):
            joined[name] += one["delta"].get(name) or ""
        for call in one["delta"].get("tool_calls") or []:
            if "id" in call:
                joined["calls"].append([call["function"]["name"], ""])
            joined["calls"][call["index"]][1] += call["function"].get("arguments") or ""
    message = choice["message"]
    calls = [one["function"] for one in message.get("tool_calls") or []]
    assert joined == {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "calls": [[one["name"], one["arguments"]] for one in calls],
    }
    assert reason == choice["finish_reason"]
    return choice


def test_harmony_has_two_more_tokens_that_end_answers(served: Server) -> None:
    """The files name only <|endoftext|>."""
    info = served.http.get("/tokenizer_info").json()
    ends = make_tokenizer().convert_tokens_to_ids(["<|return|>", "<|call|>"])
    assert info["eos_token_ids"] == [checkpoints.EOS, *ends]


def test_chat_has_reasoning_and_content(served: Server) -> None:
    choice = chat(served, ANSWER)
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Cold.")
    assert message["reasoning"] == "Hm."
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] is None


def test_offline_chats_have_the_servers_content(
    served: Server, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens are kept, and with special tokens, the text has all of them."""
    monkeypatch.syspath_prepend(EXAMPLE)
    two_messages = (
        f"<|channel|>commentary<|message|>First.{NEXT}<|channel|>final<|message|>Last.<|return|>"
    )
    cases = [(ANSWER, 400), (CALLING, 400), (CALLING, 28), (two_messages, 400)]
    expected = [
        chat(served, text, tools=TOOLS, max_tokens=most)["message"]["content"]
        for text, most in cases
    ]
    scripts = [make_tokenizer().encode(text, add_special_tokens=False) for text, _ in cases]
    params = [
        SamplingParams(max_tokens=most, temperature=0, extra_args={"script": script})
        for script, (_, most) in zip(scripts, cases, strict=True)
    ]
    processors = {"logits_processors": ["tk_example.processor:Script"]}
    llm = LLM(str(folder), device="cpu", num_gpu_blocks_override=2048, **processors)
    results = llm.chat([ASK] * len(cases), params, tools=TOOLS)
    assert [result.outputs[0].text for result in results] == expected
    found = [list(result.outputs[0].token_ids) for result in results]
    assert found == [script[:most] for script, (_, most) in zip(scripts, cases, strict=True)]
    params[0].skip_special_tokens = False
    [result] = llm.chat(ASK, params[0])
    assert result.outputs[0].text == ANSWER.removesuffix("<|return|>")
    llm.shutdown()


def test_chat_has_preamble_and_call(served: Server) -> None:
    choice = chat(served, CALLING, tools=TOOLS)
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.\n\nOslo?", "I look.")
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city":"Oslo"}'}
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("length", range(1, 128, 18))
def test_answer_cut_anywhere_has_no_marks(served: Server, length: int) -> None:
    choice = chat(served, CALLING, tools=TOOLS, max_tokens=length)
    message = choice["message"]
    assert choice["finish_reason"] == "length"
    assert "Hm.\n\nOslo?".startswith(message.get("reasoning_content", ""))
    assert "I look.".startswith(message["content"] or "")
    for call in message.get("tool_calls") or []:
        assert '{"city":"Oslo"}'.startswith(call["function"]["arguments"])


def test_several_answers_and_log_probabilities_keep_marks_out(served: Server) -> None:
    fields = {"n": 2, "logprobs": True, "skip_special_tokens": True}
    body = {"messages": ASK, "max_tokens": 400, **script(ANSWER), **fields}
    choices = served.http.post("/v1/chat/completions", json=body).json()["choices"]
    assert [one["message"]["content"] for one in choices] == ["Cold."] * 2
    tokens = [one["token"] for one in choices[0]["logprobs"]["content"]]
    assert "".join(tokens) == ANSWER  # log-probabilities are those of all tokens


def test_beams_have_no_marks(served: Server) -> None:
    body = {"messages": ASK, "max_tokens": 40, "use_beam_search": True, "best_of": 2, "n": 2}
    body["return_token_ids"] = True
    choices = served.http.post("/v1/chat/completions", json=body).json()["choices"]
    for choice in choices:
        parser = AnswerParser(dictate("", 1).plan)
        text = make_tokenizer().decode(choice["token_ids"]).removesuffix("<|endoftext|>")
        expected = parser.message(text, choice["finish_reason"]).content
        assert choice["message"]["content"] == expected
        assert not any(mark in expected for mark in TOKENS)


def test_final_message_is_continued(served: Server) -> None:
    messages = [*ASK, {"role": "assistant", "content": "It is"}]
    fields = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    choice = chat(served, " cold.<|return|>", **fields)
    assert choice["message"]["content"] == " cold."
    assert "reasoning_content" not in choice["message"]


class Dictated(SimpleNamespace):
    """A running answer whose text is known, in pieces of some size."""

    num_tokens = 400

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        pieces = [self.text[i : i + self.size] for i in range(0, len(self.text), self.size)]
        for piece in pieces:
            yield 0, Delta(0, piece, [])
        yield 0, Delta(0, "", [], finish_reason="stop")

    def usage(self) -> Usage:
        return Usage(1, 400, 401, PromptTokensDetails(0))


def dictate(text: str, size: int) -> ChatAnswer:
    tools = [ChatTool.model_validate(one).plain() for one in TOOLS]
    opening = "<|start|>assistant"
    plan = AnswerPlan(None, HarmonyFormat, tools, True, False, False, opening=opening)
    tokenizer: Any = SimpleNamespace(encode=lambda text, add_special_tokens: list(text.encode()))
    group: Any = Dictated(text=text.removesuffix("<|call|>"), size=size)
    return ChatAnswer(group, plan, tokenizer, SamplingParams())


@pytest.mark.parametrize("size", [1, 5, 10_000])
@pytest.mark.parametrize("stream", [False, True])
async def test_response_has_an_item_for_each_message(size: int, stream: bool) -> None:
    answer = dictate(CALLING, size)
    body = ResponsesRequest(input="Weather?", tools=FLAT_TOOLS)
    builder = ResponseBuilder(body, answer, "1", "tiny")
    if stream:
        events = [json.loads(one.split(b"data: ")[1]) async for one in builder.events()]
        done = events[-1]["response"]
        added = [one["item"] for one in events if one["type"] == "response.output_item.added"]
        assert [one["type"] for one in added] == [one["type"] for one in done["output"]]
        for index, item in enumerate(done["output"]):
            deltas = [
                one["delta"]
                for one in events
                if one.get("output_index") == index and one["type"].endswith(".delta")
            ]
            assert "".join(deltas) == text_of(item)
    else:
        done = await builder.collect()
    assert [(one["type"], text_of(one)) for one in done["output"]] == [
        ("reasoning", "Hm."),
        ("message", "I look."),
        ("reasoning", "Oslo?"),
        ("function_call", '{"city":"Oslo"}'),
    ]
    assert done["status"] == "completed"
    assert done["usage"]["output_tokens_details"]["reasoning_tokens"] == len("Hm.Oslo?")


def text_of(item: dict[str, Any]) -> str:
    return item["arguments"] if "arguments" in item else item["content"][0]["text"]


@pytest.mark.parametrize("choice", ["any", "auto"])
def test_anthropic_blocks_have_no_marks(served: Server, choice: str) -> None:
    """The model's own answers: random messages, or reasoning and a required call."""

    import anthropic

    body: Any = {"model": "tiny", "messages": ASK, "max_tokens": 300}
    body["extra_body"] = {"temperature": 0}
    body["tools"] = [{"name": "weather", "input_schema": WEATHER}]
    body["tool_choice"] = {"type": choice}
    with anthropic.Anthropic(base_url=served.url, api_key="any", max_retries=0) as client:
        message = client.messages.create(**body)
        with client.messages.stream(**body) as events:
            streamed = events.get_final_message()
    kinds = [one.type for one in message.content]
    assert kinds == [one.type for one in streamed.content]
    assert not any(mark in message.model_dump_json() for mark in TOKENS)
    if choice == "any":
        assert kinds == ["thinking"] * (len(kinds) - 1) + ["tool_use"]
        assert message.content[-1] == streamed.content[-1].model_copy(
            update={"id": message.content[-1].id}
        )
        jsonschema.validate(message.content[-1].input, WEATHER)
        assert message.stop_reason == "tool_use"


# ---- constraints


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_required_call_follows_the_reasoning(served: Server, choice: Any) -> None:
    """The script is a part of what the grammar allows; the rest is the model's."""
    thoughts = f"<|channel|>analysis<|message|>a < b{NEXT}"
    for text in (f"{thoughts}<|channel|>commentary", thoughts + " to=", "<|channel|>c"):
        answer = chat(served, text, tools=TOOLS, tool_choice=choice)
        message = answer["message"]
        assert message.get("reasoning_content") == ("a < b" if "a < b" in text else None)
        [call] = message["tool_calls"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER)
        assert message["content"] is None
        assert answer["finish_reason"] == ("tool_calls" if choice == "required" else "stop")


@pytest.mark.parametrize("tools", [[], TOOLS])
@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"regex": "[ab]{2}/"}}, "[ab]{2}/"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"enum": ["warm"]}},
                }
            },
            '"warm"',
        ),
    ],
)
def test_constraint_applies_to_the_final_message(
    served: Server, constraint: Any, pattern: str, tools: Any
) -> None:
    for text in (f"<|channel|>analysis<|message|>Free: {{[{NEXT}<|channel|>f", "<|channel|>f"):
        answer = chat(served, text, tools=tools or None, **constraint)
        assert re.fullmatch(pattern, answer["message"]["content"])
        reasoning = answer["message"].get("reasoning_content")
        assert reasoning == ("Free: {[" if "Free" in text else None)
        assert answer["finish_reason"] == "stop"


def test_constrained_answer_next_to_tools_may_be_a_call(served: Server) -> None:
    fields = {"tools": TOOLS, "structured_outputs": {"choice": ["yes"]}}
    choice = chat(served, "<|channel|>c", **fields)
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert not choice["message"]["content"]


def refusal(served: Server, path: str, **body: Any) -> tuple[int, str]:
    answer: httpx.Response = served.http.post(path, json=body)
    return answer.status_code, answer.json()["error"]["message"]


def test_grammar_constraints_are_refused(served: Server) -> None:
    body = {"messages": ASK, "structured_outputs": {"grammar": 'start: "x"'}}
    status, message = refusal(served, "/v1/chat/completions", **body)
    assert (status, message[:43]) == (400, "structured_outputs cannot take a grammar or")


# ---- the prompt


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("chat/completions", {"messages": ASK, "reasoning_effort": "none"}, "reasoning_effort"),
        ("responses", {"input": "Hi", "reasoning": {"effort": "minimal"}}, "reasoning.effort"),
        (
            "messages",
            {"messages": ASK, "max_tokens": 1, "output_config": {"effort": "max"}},
            "output_config.effort",
        ),
    ],
)
def test_unknown_effort_is_refused(served: Server, path: str, body: Any, name: str) -> None:
    status, message = refusal(served, f"/v1/{path}", **body)
    assert status == 400
    assert message.startswith(f"{name} must be low, medium or high for this model; got ")


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("responses", {"input": "Hi", "tools": [{"type": "web_search"}]}, "web_search"),
        (
            "responses",
            {"input": "Hi", "tools": [{"type": "code_interpreter", "container": "x"}]},
            "code_interpreter",
        ),
        ("chat/completions", {"messages": ASK, "tools": [{"type": "browser"}]}, "browser"),
        (
            "chat/completions",
            {"messages": ASK, "chat_template_kwargs": {"builtin_tools": ["python"]}},
            "builtin_tools",
        ),
    ],
)
def test_built_in_tools_are_refused_by_name(
    served: Server, path: str, body: Any, named: str
) -> None:
    status, message = refusal(served, f"/v1/{path}", **body)
    assert status == 400
    assert named in message


def prompt(served: Server, **body: Any) -> str:
    """Return the prompt of a chat."""
    tokens = served.http.post("/tokenize", json=body).json()["tokens"]
    return make_tokenizer().decode(tokens)


def test_effort_and_tools_reach_the_template(served: Server) -> None:
    text = prompt(served, messages=ASK, tools=TOOLS, reasoning_effort="high")
    assert "Reasoning: high\n" in text
    assert 'type weather = (_: {\ncity: "Oslo" | "Rome",\n}) => any;' in text
    assert text.endswith("<|start|>user<|message|>Weather?<|end|><|start|>assistant")


def test_reasoning_before_a_call_is_shown_again(served: Server, ai: openai.OpenAI) -> None:
    """In every interface, until the final message."""
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    turn = [
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "1", "content": "cold"},
    ]
    shown = (
        "<|start|>assistant<|channel|>analysis<|message|>Hm.\n\nI look.<|end|>"
        "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{}<|call|>"
        "<|start|>functions.weather to=assistant<|channel|>commentary<|message|>cold<|end|>"
    )
    text = prompt(served, messages=[*ASK, *turn])
    assert text.endswith(f"{shown}<|start|>assistant")
    done = [*turn, {"role": "assistant", "content": "Cold.", "reasoning_content": "So."}, *ASK]
    later = prompt(served, messages=[*ASK, *done])
    assert "Hm." not in later
    assert "So." not in later

    items: Any = [
        *ASK,
        {"type": "reasoning", "id": "rs", "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": "I look."},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "cold"},
    ]
    response = ai.responses.create(model="tiny", input=items, max_output_tokens=1)
    blocks = [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "1", "name": "weather", "input": {}},
    ]
    messages = [
        *ASK,
        {"role": "assistant", "content": blocks},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "1", "content": "cold"}],
        },
    ]
    count = served.http.post("/v1/messages/count_tokens", json={"messages": messages}).json()
    length = len(make_tokenizer().encode(text))
    assert response.usage.input_tokens == count["input_tokens"] == length
