"""Logits processors on a GPU, with CUDA graphs and overlapping steps (`make test-gpu`)."""

from __future__ import annotations

import pytest

from tests import checkpoints
from toolkit import LLM, SamplingParams
from toolkit.errors import EngineError

pytestmark = pytest.mark.gpu

GREEDY = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
PROMPTS = [{"prompt_token_ids": list(range(3 + 5 * i))} for i in range(6)]


@pytest.mark.parametrize("settings", [{}, {"async_scheduling": False}, {"enforce_eager": True}])
def test_processors_change_only_rows_that_ask(checkpoint, settings):
    names = [f"tests.inside.plugged:{name}" for name in ("NoRepeat", "Unseen", "Failing")]
    llm = LLM(
        str(checkpoint("qwen3")),
        dtype="float32",
        num_gpu_blocks_override=512,
        logits_processors=names,
        **settings,
    )
    model = checkpoints.make_reference("qwen3")
    plain = SamplingParams(**GREEDY)
    asking = [
        SamplingParams(**GREEDY, extra_args=arguments)
        for arguments in ({"no_repeat": 16}, {"unseen": True})
    ]
    results = llm.generate(PROMPTS, [plain, *asking] * 2, use_tqdm=False)
    for index, (prompt, result) in enumerate(zip(PROMPTS, results, strict=True)):
        tokens = list(result.outputs[0].token_ids)
        if index % 3 == 0:
            assert tokens == checkpoints.greedy(model, prompt["prompt_token_ids"], 16)
            continue
        assert len(set(tokens)) == 16
        for at, token in enumerate(tokens):
            logits = checkpoints.logits(model, prompt["prompt_token_ids"] + tokens[:at])[-1]
            logits[tokens[:at]] = -float("inf")
            assert logits.max() - logits[token] < 1e-3
    failing = SamplingParams(**GREEDY, extra_args={"fail_at": 2})
    with pytest.raises(EngineError, match=r"1 of 6 requests failed.*KeyError"):
        llm.generate(PROMPTS, [failing, *[plain] * 5], use_tqdm=False)
    llm.generate(PROMPTS, plain, use_tqdm=False)
