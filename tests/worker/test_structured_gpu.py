"""Grammars on a GPU, with CUDA graphs and overlapping steps (`make test-gpu`)."""

from __future__ import annotations

import json
import re

import pytest

from tests import checkpoints
from toolkit import LLM, SamplingParams, StructuredOutputsParams

pytestmark = pytest.mark.gpu

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["sea", "land"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 30},
    },
    "required": ["kind", "days"],
    "additionalProperties": False,
}
PROMPT = list(b"The sea is")
FREE = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def constrained(**options) -> SamplingParams:
    grammar = {name: options.pop(name) for name in ("choice", "regex", "json") if name in options}
    outputs = StructuredOutputsParams(**grammar)
    return SamplingParams(n=2, seed=3, max_tokens=60, structured_outputs=outputs, **options)


@pytest.mark.parametrize("settings", [{}, {"async_scheduling": False}, {"enforce_eager": True}])
def test_grammars_hold_and_do_not_change_other_requests(checkpoint, settings):
    model = checkpoints.make_reference("qwen3")
    llm = LLM(str(checkpoint("qwen3")), dtype="float32", num_gpu_blocks_override=512, **settings)
    many = [
        FREE,
        constrained(choice=["yes", "no"]),
        constrained(regex="[a-f]{5,20}"),
        FREE,
        constrained(json=SCHEMA),
        constrained(regex="[0-9]{3}", min_tokens=3, repetition_penalty=1.2, logprobs=2),
    ]
    outputs = llm.generate([{"prompt_token_ids": PROMPT}] * len(many), many, use_tqdm=False)
    free = checkpoints.greedy(model, PROMPT, 24)
    assert [outputs[i].outputs[0].token_ids for i in (0, 3)] == [free, free]
    for answer in outputs[1].outputs:
        assert answer.text in ("yes", "no")
    for answer in outputs[2].outputs:
        assert re.fullmatch("[a-f]{5,20}", answer.text)
    for answer in outputs[4].outputs:
        assert answer.finish_reason == "length" or json.loads(answer.text)["kind"] in (
            "sea",
            "land",
        )
    for answer in outputs[5].outputs:
        assert re.fullmatch("[0-9]{3}", answer.text)
        assert len(answer.logprobs) == len(answer.token_ids)
