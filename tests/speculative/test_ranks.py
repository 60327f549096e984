"""Prompt lookup in models that several ranks share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import engines
from tests.speculative import test_differential as differential
from tests.speculative.drafting import SETTINGS, answers, drafting_engine, save_llama
from tests.speculative.near_ties import require_equal_or_near_ties
from tests.speculative.plain import Llama
from toolkit import LLM
from toolkit.engine.outputs import RequestOutput

pytestmark = pytest.mark.usefixtures("forked_processes")

CASES = {
    "greedy": {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True, "logprobs": 1},
    "sampled": {"temperature": 0.3, "seed": 3, "max_tokens": 16, "repetition_penalty": 1.1},
}
NGRAM = {"method": "ngram", "prompt_lookup_min": 1}


def count_drafts(llm: LLM) -> list[int]:
    """Return the numbers of drafts and of accepted ones, which grow with each step."""
    take, total = engines.scheduler(llm).take_stats, [0, 0]

    def counting():
        stats = take()
        total[0] += stats.spec_decode_num_draft_tokens
        total[1] += stats.spec_decode_num_accepted_tokens
        return stats

    engines.scheduler(llm).take_stats = counting
    return total


@pytest.mark.parametrize("sharded", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_answers_are_those_of_one_rank_without_drafts(tmp_path: Path, sharded: str):
    folder = save_llama(tmp_path / "target", num_hidden_layers=2)
    prompts = [[*range(i, i + 5)] * 5 for i in range(0, 60, 10)]
    plain = LLM(str(folder), **SETTINGS)
    expected = [answers(plain, prompts, **params) for params in CASES.values()]
    plain.shutdown()
    llm = drafting_engine(folder, None, **{sharded: 2}, speculative_config=NGRAM)
    total = count_drafts(llm)
    assert [answers(llm, prompts, **params) for params in CASES.values()] == expected
    llm.shutdown()
    assert 0 < total[1] < total[0]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("sharded", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_drafts_change_nothing_on_two_gpus(tmp_path: Path, sharded: str, enforce_eager: bool):
    """Requests with all options together, in chunks and preempted, and some of them alone.

    With stages, steps of requests that run together overlap."""
    folder = save_llama(tmp_path / "target", num_hidden_layers=2)
    settings = differential.SETTINGS | {
        "device": "cuda",
        "num_threads": None,
        "enforce_eager": enforce_eager,
        "swap_space": 0.001,
        sharded: 2,
    }
    prompts, params = differential.random_requests()
    num_alone = 20

    def run(llm: LLM) -> list[RequestOutput]:
        found = differential.run(llm)
        for prompt, param in zip(prompts[:num_alone], params[:num_alone], strict=True):
            found += llm.generate({"prompt_token_ids": prompt}, param, use_tqdm=False)
        llm.shutdown()
        return found

    expected = run(LLM(str(folder), **settings))
    llm = LLM(str(folder), **settings, speculative_config=NGRAM)
    assert bool(engines.core(llm).info.step_times.verifying) == (not enforce_eager)
    total = count_drafts(llm)
    found = run(llm)
    both = params + params[:num_alone]
    assert require_equal_or_near_ties(Llama(folder), both, expected, found) <= len(both) // 40
    assert total[0] > 300
    assert 0.02 < total[1] / total[0] < 1
