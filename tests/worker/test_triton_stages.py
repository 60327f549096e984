"""Pipeline stages with Triton's kernels match a CPU with all layers (Triton interpreter)."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import engines
from tests.worker.stages import TwoStages
from tests.worker.test_batch_state import PARAMS
from toolkit import LLM, SamplingParams
from toolkit.kernels.table import TritonKernels
from toolkit.worker.startup.warm_up import WarmUp


def test_two_gpu_stages_sample_as_one_cpu_runner(
    checkpoint: Callable[[str], Path], triton_runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not triton_runs:
        pytest.skip("Triton was imported without its interpreter")
    rng = random.Random(0)
    prompts = [
        {"prompt_token_ids": [rng.randrange(90) for _ in range(n)]}
        for n in (3, 17, 30, 1, 8, 21, 12, 5, 5, 9)
    ]
    params = [SamplingParams(max_tokens=4, ignore_eos=True, **p) for p in PARAMS.values()]
    params[0] = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0, prompt_logprobs=1)
    no_repeat, logprobs = {"extra_args": {"no_repeat": 9}}, {"temperature": 0.0, "logprobs": 1}
    params += [
        SamplingParams(max_tokens=4, ignore_eos=True, **one)
        for one in (no_repeat | logprobs, no_repeat | {"seed": 1})
    ]
    settings = {
        "logits_processors": ["tests.inside.plugged:NoRepeat"],
        "max_num_seqs": 5,
        "block_size": 4,
        "max_num_batched_tokens": 40,
        "num_gpu_blocks_override": 80,
    }

    def answers(stages: int) -> list[Any]:
        llm = LLM(
            str(checkpoint("gpt2")),
            device="cpu",
            attention_backend="torch",
            pipeline_parallel_size=stages,
            **settings,
        )
        if stages > 1:
            runners = [worker.runner for worker in engines.executor(llm).workers]
            assert {type(runner.sampler.kernels) for runner in runners} == {TritonKernels}
        return llm.generate(prompts, params, use_tqdm=False)

    expected = answers(1)
    monkeypatch.setattr("toolkit.engine.llm.start_executor", TwoStages)
    monkeypatch.setattr("toolkit.worker.worker.kernels_for", lambda device: TritonKernels())
    monkeypatch.setattr(WarmUp, "compile", lambda *_: None)  # there is no compiler
    actual = answers(2)
    for a, b in zip(expected, actual, strict=True):
        assert list(a.outputs[0].token_ids) == list(b.outputs[0].token_ids)
    for a, b in zip(expected[0].prompt_logprobs[1:], actual[0].prompt_logprobs[1:], strict=True):
        assert {t: x.logprob for t, x in b.items()} == pytest.approx(
            {t: x.logprob for t, x in a.items()}, abs=1e-4
        )
