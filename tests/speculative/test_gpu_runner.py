"""Drafts on the GPU's runner, in Triton's interpreter: the answers are those of the CPU's
runner without drafts."""

from __future__ import annotations

import random

import pytest

from tests import engines
from tests.speculative.drafting import few_measured_steps, logged_steps
from toolkit import LLM, SamplingParams
from toolkit.kernels.table import CPUKernels, TritonKernels
from toolkit.sampling.params import StructuredOutputsParams

PARAMS = {
    "greedy": {},
    "log-probabilities": {"logprobs": 2},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.1},
    "biases": {"logit_bias": {5: 4.0, 9: -3.0}},
    "forbidden": {"bad_words_token_ids": [[3, 3], [8, 8]], "min_tokens": 3},
    "seeded": {"temperature": 0.3, "seed": 11},
    "seeded top-k": {"temperature": 0.3, "seed": 12, "top_k": 5, "logprobs": 0},
    "grammar": {"structured_outputs": StructuredOutputsParams(regex="(ab|ba){12}")},
    "off": {"num_speculative_tokens": 0},
}
SETTINGS = {
    "device": "cpu",
    "attention_backend": "torch",
    "max_num_seqs": 4,
    "block_size": 4,
    "max_num_batched_tokens": 40,
}


def test_answers_are_those_without_drafts(checkpoint, gpu_runner, monkeypatch):
    """Requests with and without drafts, chunks of prompts, and steps that overlap.

    `test_gpu_constraints` has prompt lookup."""
    rng = random.Random(3)
    prompts = [[rng.randrange(90) for _ in range(n)] * 2 for n in (3, 9, 30, 1, 8, 21, 12, 7, 5)]
    params = [SamplingParams(max_tokens=6, ignore_eos=True, **{"temperature": 0.0} | p)
              for p in PARAMS.values()]  # fmt: skip
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]

    def answers(**settings) -> tuple[list, object]:
        with few_measured_steps():
            llm = LLM(str(checkpoint("qwen3")), async_scheduling=True, **SETTINGS | settings)
        assert type(engines.kernels(llm)) is (TritonKernels if settings else CPUKernels)
        with logged_steps(llm) as log:
            found = llm.generate(inputs, params, use_tqdm=False)
        llm.shutdown()
        return [one.outputs[0] for one in found], log

    with monkeypatch.context() as patch:
        patch.setattr("toolkit.worker.worker.kernels_for", lambda device: CPUKernels())
        expected, _ = answers()
    config = {"method": "draft_model", "model": str(checkpoint("qwen3"))}
    found, log = answers(speculative_config=config)
    assert log.num_drafts > 25
    assert 0 < log.num_accepted < log.num_drafts
    for a, b in zip(expected, found, strict=True):
        assert list(a.token_ids) == list(b.token_ids)
        if a.logprobs:
            assert [{t: x.rank for t, x in at.items()} for at in a.logprobs] == [
                {t: x.rank for t, x in at.items()} for at in b.logprobs
            ]
            assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, abs=1e-4)


@pytest.mark.gpu
def test_answers_on_a_gpu(checkpoint):
    """With and without drafts and CUDA graphs. In fp32, sums differ too little to change a token.

    A graph of 64 tokens has room for as many points, which are not a prompt's first tokens."""
    rng = random.Random(3)
    prompts = [[rng.randrange(90) for _ in range(n)] * 2 for n in (3, 9, 30, 1, 8, 21, 12, 7, 5)]
    params = [SamplingParams(max_tokens=48, ignore_eos=True, **{"temperature": 0.0} | p)
              for p in PARAMS.values()]  # fmt: skip
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    settings = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "dtype": "float32"}
    drafters = (
        None,
        {"method": "ngram", "prompt_lookup_min": 1},
        {"method": "draft_model", "model": str(checkpoint("qwen3"))},
    )
    found = []
    for enforce_eager in (True, False):
        for config in drafters:
            settings |= {"enforce_eager": enforce_eager, "speculative_config": config}
            llm = LLM(str(checkpoint("qwen3")), num_gpu_blocks_override=256, **settings)
            with logged_steps(llm) as log:
                answers = llm.generate(inputs * 2, params * 2, use_tqdm=False)
            llm.shutdown()
            found.append([list(one.outputs[0].token_ids) for one in answers])
            if config:
                assert 0 < log.num_accepted < log.num_drafts
    assert found[1:] == found[:1] * 5
