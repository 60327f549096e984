"""The engine produces the same tokens with and without the CPU kernels."""

from __future__ import annotations

import random

import pytest
import torch

from tests.checkpoints import VOCAB
from toolkit import LLM, SamplingParams
from toolkit.hardware import parent
from toolkit.kernels import cpu
from toolkit.models.decoder import Decoder
from toolkit.worker.step_sampler import StepSampler

pytestmark = pytest.mark.skipif(not cpu.available(), reason=f"the CPU kernels: {cpu.problem()}")


def greedy(folder, **settings) -> list[list[int]]:
    rng = random.Random(0)
    prompts = [
        {"prompt_token_ids": [rng.randrange(VOCAB) for _ in range(n)]} for n in (5, 40, 17, 60)
    ]
    llm = LLM(
        str(folder), device="cpu", dtype="float32", kv_cache_memory=0.01, max_num_seqs=4, **settings
    )
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    results = llm.generate(prompts, params, use_tqdm=False)
    llm.shutdown()
    return [list(result.outputs[0].token_ids) for result in results]


@pytest.mark.parametrize("name", ["gpt2", "llama3-gqa", "mistral-window", "qwen3"])
def test_pytorch_gives_the_same_tokens_without_the_library(checkpoint, name, monkeypatch):
    folder = checkpoint(name)
    with_kernels = greedy(folder)
    monkeypatch.setattr(cpu, "available", lambda: False)
    assert greedy(folder) == with_kernels


def test_variants_and_numbers_of_threads_give_the_same_tokens(checkpoint):
    folder = checkpoint("llama3-gqa")
    expected = greedy(folder, num_threads=1)
    for variant in cpu.variants():
        with cpu.using(variant):
            assert greedy(folder, num_threads=2) == expected, variant


@pytest.mark.parametrize(
    ("own_process", "dtype", "inside"),
    [(True, "float32", 1), (True, "float16", 2), (False, "float32", 2)],
)
def test_pytorch_uses_one_thread_in_a_model_of_cpu_kernels(
    checkpoint, own_process, dtype, inside, monkeypatch
):
    """Sampling uses all threads. tk does not change the number in a user's process."""
    assert not parent.is_own_process()
    monkeypatch.setattr(parent, "_has_parent", own_process)
    forward, choose = Decoder.forward, StepSampler.choose
    computing, sampling = [], []

    def counted_forward(model, *inputs):
        computing.append(torch.get_num_threads())
        return forward(model, *inputs)

    def counted_choose(runner, *inputs):
        sampling.append(torch.get_num_threads())
        return choose(runner, *inputs)

    monkeypatch.setattr(Decoder, "forward", counted_forward)
    monkeypatch.setattr(StepSampler, "choose", counted_choose)
    llm = LLM(
        str(checkpoint("gpt2")), device="cpu", dtype=dtype, kv_cache_memory=0.01, num_threads=2
    )
    llm.generate(
        {"prompt_token_ids": [1, 2, 3]}, SamplingParams(temperature=0, max_tokens=2), use_tqdm=False
    )
    after = torch.get_num_threads()
    llm.shutdown()
    assert set(computing) == {inside}
    assert set(sampling) == {2}
    assert after == 2
