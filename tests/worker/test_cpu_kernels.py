"""The engine with the CPU kernels and without them: the same tokens."""

from __future__ import annotations

import random

import pytest
import torch

from tests.checkpoints import VOCAB
from toolkit import LLM, SamplingParams
from toolkit.hardware import parent
from toolkit.kernels import cpu
from toolkit.models.decoder import Decoder
from toolkit.worker.model_runner import ModelRunner

pytestmark = pytest.mark.skipif(not cpu.available(), reason=f"the CPU kernels: {cpu.problem()}")


def greedy(folder, **settings) -> list[list[int]]:
    rng = random.Random(0)
    prompts = [
        {"prompt_token_ids": [rng.randrange(VOCAB) for _ in range(n)]} for n in (5, 40, 17, 60)
    ]
    llm = LLM(
        str(folder), device="cpu", dtype="float32", kv_cache_memory=0.05, max_num_seqs=4, **settings
    )
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    results = llm.generate(prompts, params, use_tqdm=False)
    llm.shutdown()
    return [list(result.outputs[0].token_ids) for result in results]


@pytest.mark.parametrize("name", ["gpt2", "llama3-gqa", "mistral-window", "qwen3"])
def test_without_the_library_pytorch_gives_the_same_tokens(checkpoint, name, monkeypatch):
    folder = checkpoint(name)
    with_kernels = greedy(folder)
    monkeypatch.setattr(cpu, "available", lambda: False)
    assert greedy(folder) == with_kernels


def test_every_variant_gives_the_same_tokens_on_any_number_of_threads(checkpoint):
    folder = checkpoint("llama3-gqa")
    expected = greedy(folder, num_threads=1)
    for variant in cpu.variants():
        with cpu.using(variant):
            assert greedy(folder, num_threads=2) == expected, variant


@pytest.mark.parametrize(
    ("own_process", "dtype", "inside"),
    [(True, "float32", 1), (True, "float16", 2), (False, "float32", 2)],
)
def test_where_kernels_compute_pytorch_has_one_thread_within_the_model(
    checkpoint, own_process, dtype, inside, monkeypatch
):
    """What samples, and computes log-probabilities, has all of them. In a user's process the number is the user's."""
    assert not parent.is_own_process()
    monkeypatch.setattr(parent, "_has_parent", own_process)
    forward, choose = Decoder.forward, ModelRunner._choose
    seen, sampling = [], []

    def looking(model, *inputs):
        seen.append(torch.get_num_threads())
        return forward(model, *inputs)

    def choosing(runner, *inputs):
        sampling.append(torch.get_num_threads())
        return choose(runner, *inputs)

    monkeypatch.setattr(Decoder, "forward", looking)
    monkeypatch.setattr(ModelRunner, "_choose", choosing)
    llm = LLM(
        str(checkpoint("gpt2")), device="cpu", dtype=dtype, kv_cache_memory=0.05, num_threads=2
    )
    llm.generate(
        {"prompt_token_ids": [1, 2, 3]}, SamplingParams(temperature=0, max_tokens=2), use_tqdm=False
    )
    after = torch.get_num_threads()
    llm.shutdown()
    assert set(seen) == {inside}
    assert set(sampling) == {2}
    assert after == 2
