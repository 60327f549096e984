"""Prompt lookup in models that several ranks share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.speculative.drafting import SETTINGS, answers, save_llama
from toolkit import LLM

CASES = {
    "greedy": {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, "logprobs": 1},
    "sampled": {"temperature": 0.3, "seed": 3, "max_tokens": 40, "repetition_penalty": 1.1},
}


@pytest.mark.parametrize("sharded", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_answers_are_those_of_one_rank_without_drafts(tmp_path: Path, sharded: str):
    folder = save_llama(tmp_path / "target", num_hidden_layers=2)
    prompts = [[*range(i, i + 5)] * 5 for i in range(0, 60, 10)]
    plain = LLM(str(folder), **SETTINGS)
    expected = [answers(plain, prompts, **params) for params in CASES.values()]
    plain.shutdown()
    config = {"method": "ngram", "prompt_lookup_min": 1}
    llm = LLM(str(folder), **SETTINGS, **{sharded: 2}, speculative_config=config)
    count, total = llm._core.scheduler._count_drafts, [0, 0]

    def counting(num_drafts, num_accepted):
        total[0] += num_drafts.sum()
        total[1] += num_accepted.sum()
        count(num_drafts, num_accepted)

    llm._core.scheduler._count_drafts = counting
    assert [answers(llm, prompts, **params) for params in CASES.values()] == expected
    llm.shutdown()
    assert 0 < total[1] < total[0]
