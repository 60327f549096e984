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
    take, total = llm._core.scheduler.take_stats, [0, 0]

    def counting():
        stats = take()
        total[0] += stats.spec_decode_num_draft_tokens
        total[1] += stats.spec_decode_num_accepted_tokens
        return stats

    llm._core.scheduler.take_stats = counting
    assert [answers(llm, prompts, **params) for params in CASES.values()] == expected
    llm.shutdown()
    assert 0 < total[1] < total[0]
