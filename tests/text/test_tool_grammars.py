"""Tool calls of a model with random weights, constrained to each format and parsed again."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from tests import checkpoints
from toolkit import LLM, SamplingParams, StructuredOutputsParams
from toolkit.api.openai.answer_parts import AnswerPlan
from toolkit.api.openai.schemas import ChatRequest
from toolkit.api.openai.tools import Tool, ToolUse
from toolkit.config import ServerConfig
from toolkit.errors import InvalidRequestError
from toolkit.text.parsers import TOOL_FORMATS, Parsers

SCHEMAS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"enum": ["Oslo", 'q"\\ é'], "description": "城市"},
            "days": {"enum": [1, 22]},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
    "tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"next": {"$ref": "#/$defs/node"}},
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "set": {
        "type": "object",
        "properties": {"v": {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}},
    },
    "now": {"type": "object", "additionalProperties": False},
}
TOOLS = [
    Tool.of(name, None, None if name == "now" else schema, None) for name, schema in SCHEMAS.items()
]
MARKERS = ["[TOOL_CALLS]", "<tool_call>"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """A model in whose tokenizer two markers are special tokens."""
    folder = checkpoints.save(
        checkpoints.make_reference("llama3-gqa"), tmp_path_factory.mktemp("tools") / "m"
    )
    checkpoints.edit_json(folder / "config.json", max_position_embeddings=2048)
    tokenizer = checkpoints.make_tokenizer()
    tokenizer.add_tokens(MARKERS, special_tokens=True)
    tokenizer.chat_template = "{{ tools }}<tool_call>"
    tokenizer.save_pretrained(folder)
    return LLM(str(folder), num_gpu_blocks_override=4096)


def make_plan(llm: LLM, config: ServerConfig | None = None, **body: Any) -> AnswerPlan:
    tools = [{"function": {"name": "f"}}]
    request = ChatRequest.model_validate({"messages": [], "tools": tools} | body)
    template, parsers = llm.tokenizer.chat_template_text, Parsers.choose(config or ServerConfig())
    return AnswerPlan.of(request.tool_use(), template, [1], llm.tokenizer, parsers)


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("parallel", [True, False])
def test_constrained_calls_are_parsed_with_valid_arguments(llm, name, parallel):
    tool_format = TOOL_FORMATS[name]
    grammar = tool_format.answer_grammar(TOOLS, parallel=parallel)
    # Ends of values, and no "analysis": its text would not end.
    weights = dict.fromkeys('"}]', 60.0) | {"a": -100.0}
    bias = {llm.tokenizer.encode(c)[0]: weight for c, weight in weights.items()}
    bias[checkpoints.EOS] = 90.0
    params = SamplingParams(
        n=8,
        max_tokens=600,
        structured_outputs=StructuredOutputsParams(grammar=grammar),
        seed=1,
        temperature=12.0,
        logit_bias=bias,
        skip_special_tokens=False,
    )
    [output] = llm.generate(["Call"], params, use_tqdm=False)
    called = []
    for answer in output.outputs:
        assert answer.finish_reason == "stop"
        parser = tool_format(list(SCHEMAS))
        parts = parser.add(answer.text) + parser.end()
        calls = [part for part in parts if part.name is not None]
        assert len(calls) == len(parts) >= 1  # and no content
        assert parallel or len(calls) == 1
        for call in calls:
            schema = SCHEMAS[call.name]
            if call.name == "set":  # not strict: uniqueItems cannot be enforced, and is ignored
                schema = {"type": "object"}
            jsonschema.Draft202012Validator(schema).validate(json.loads(call.text))
            called.append(call.name)
    assert len(set(called)) > 1


@pytest.mark.parametrize("parameters", [None, {"type": "object"}])
def test_arguments_begin_without_line_breaks(parameters):
    """A confused model would write line breaks without end."""
    tool = Tool.of("now", None, parameters, None)
    grammar = TOOL_FORMATS["llama3_json"].answer_grammar([tool], parallel=False)
    call = b'{"name": "now", "parameters": {'
    matcher = LLMatcher(LLTokenizer("byte"), grammar)
    assert matcher.try_consume_tokens([*call, *b"\n"]) == len(call)


def test_plan_keeps_special_tokens_that_mark_calls(llm):
    def skips_special_tokens(plan: AnswerPlan) -> bool:
        return plan.constrain(SamplingParams(), llm.tokenizer).skip_special_tokens

    assert not skips_special_tokens(make_plan(llm))
    assert skips_special_tokens(make_plan(llm, tool_choice="none"))
    assert skips_special_tokens(make_plan(llm, ServerConfig(tool_call_parser="llama3_json")))


def test_plan_with_an_unknown_format_allows_only_required_calls(llm):
    unknown = ServerConfig(tool_call_parser="none")
    assert make_plan(llm, unknown, tool_choice="required").tool_format is not None
    with pytest.raises(InvalidRequestError, match="--tool-call-parser"):
        make_plan(llm, unknown)


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
def test_plan_finds_reasoning_at_the_end_of_the_prompt(parser, end, expected):
    tokenizer: Any = SimpleNamespace(
        decode=lambda ids, skip_special_tokens: end, chat_template_text=""
    )
    parsers = Parsers.choose(ServerConfig(reasoning_parser=parser))
    plan = AnswerPlan.of(ToolUse(), "", [1, 2], tokenizer, parsers)
    assert plan.reasoning == expected
