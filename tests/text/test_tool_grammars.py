"""A model with random weights that is held to calls of tools, in each format, and what reads them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from tests import checkpoints
from toolkit import LLM, SamplingParams, StructuredOutputsParams
from toolkit.api.openai.answer_parts import AnswerPlan
from toolkit.api.openai.schemas import ChatRequest
from toolkit.api.openai.tools import Tool
from toolkit.config import ServerConfig
from toolkit.errors import InvalidRequestError
from toolkit.text.tool_formats import FORMATS, held_to_calls

SCHEMAS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", 'q"\\ é'], "description": "城市"}, "days": {"enum": [1, 22]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "tree": {
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False}},
        "$ref": "#/$defs/node",
    },
    "set": {"type": "object", "properties": {"v": {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}}},
    "now": {"type": "object", "additionalProperties": False},
}  # fmt: skip
TOOLS = [
    Tool.model_validate(
        {"function": {"name": name} | ({} if name == "now" else {"parameters": schema})}
    )
    for name, schema in SCHEMAS.items()
]
MARKS = ["[TOOL_CALLS]", "<tool_call>"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """Two marks are special tokens of its tokenizer."""
    folder = checkpoints.save(
        checkpoints.make_reference("llama3-gqa"), tmp_path_factory.mktemp("tools") / "m"
    )
    checkpoints.edit_json(folder / "config.json", max_position_embeddings=2048)
    tokenizer = checkpoints.make_tokenizer()
    tokenizer.add_tokens(MARKS, special_tokens=True)
    tokenizer.chat_template = "{{ tools }}<tool_call>"
    tokenizer.save_pretrained(folder)
    return LLM(str(folder), num_gpu_blocks_override=4096)


def plan(llm: LLM, config: ServerConfig | None = None, **body: Any) -> AnswerPlan:
    tools = [{"function": {"name": "f"}}]
    request = ChatRequest.model_validate({"messages": [], "tools": tools} | body)
    return AnswerPlan.of(request, [1], llm.tokenizer, config or ServerConfig())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("parallel", [True, False])
def test_calls_are_read_back_with_arguments_that_validate(llm, name, parallel):
    form = FORMATS[name]
    asked = StructuredOutputsParams(grammar=held_to_calls(form, TOOLS, parallel=parallel))
    bias = {llm.tokenizer.encode(c)[0]: 20.0 for c in '"}]'} | {checkpoints.EOS: 30.0}
    params = SamplingParams(
        n=8,
        max_tokens=600,
        structured_outputs=asked,
        seed=1,
        temperature=4.0,
        logit_bias=bias,
        skip_special_tokens=False,
    )
    [output] = llm.generate(["Call"], params, use_tqdm=False)
    called = []
    for answer in output.outputs:
        assert answer.finish_reason == "stop"
        parser = form(list(SCHEMAS))
        pieces = parser.add(answer.text) + parser.end()
        calls = [piece for piece in pieces if piece.name is not None]
        assert len(calls) == len(pieces) >= 1  # and no content
        assert parallel or len(calls) == 1
        for call in calls:
            schema = SCHEMAS[call.name]
            if call.name == "set":  # not strict: what cannot be held is passed over
                schema = {"type": "object"}
            jsonschema.Draft202012Validator(schema).validate(json.loads(call.text))
            called.append(call.name)
    assert len(set(called)) > 1


def test_special_tokens_that_mark_calls_are_kept_in_the_text(llm):
    hidden = SamplingParams()
    assert not plan(llm).params(hidden, llm.tokenizer).skip_special_tokens
    assert plan(llm, tool_choice="none").params(hidden, llm.tokenizer).skip_special_tokens
    assert (
        plan(llm, ServerConfig(tool_call_parser="llama3_json"))
        .params(hidden, llm.tokenizer)
        .skip_special_tokens
    )


def test_where_nobody_knows_how_calls_are_written_they_can_be_required_and_not_left_open(llm):
    unknown = ServerConfig(tool_call_parser="none")
    assert plan(llm, unknown, tool_choice="required").form is not None
    with pytest.raises(InvalidRequestError, match="--tool-call-parser"):
        plan(llm, unknown)


@pytest.mark.parametrize(
    ("parser", "end", "expected"),
    [
        ("none", "<think>", None),
        ("qwen3", "<|assistant|>", "possible"),
        ("qwen3", "<think>\n", "begun"),
        ("qwen3", "<think>\n\n</think>\n\n", None),
        ("deepseek_r1", "<|assistant|>", "begun"),
        ("deepseek_r1", "</think>", None),
    ],
)
def test_the_prompts_end_tells_how_the_answer_begins(parser, end, expected):
    tokenizer: Any = SimpleNamespace(decode=lambda ids, skip_special_tokens: end)
    body = ChatRequest.model_validate({"messages": []})
    assert (
        AnswerPlan.of(body, [1, 2], tokenizer, ServerConfig(reasoning_parser=parser)).reasoning
        == expected
    )
