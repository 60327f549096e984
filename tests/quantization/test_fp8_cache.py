"""The KV cache in FP8: what fits into it, that every backend reads it alike, and what a model loses by it."""

from __future__ import annotations

import random

import pytest
import torch

from tests.checkpoints import VOCAB
from tests.quantization.accuracy import compare
from toolkit import LLM, SamplingParams
from toolkit.attention import choose_backend
from toolkit.errors import ConfigError
from toolkit.quantization import fp8
from toolkit.worker.kv_cache import choose_cache_dtype

NAMES = ["gpt2", "llama3-gqa", "mistral-window", "qwen3"]
TIGHT = {"num_gpu_blocks_override": 44, "block_size": 4, "enable_prefix_caching": False}


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in (5, 40, 17, 60)]


def greedy(folder, **settings) -> list[list[int]]:
    llm = LLM(str(folder), kv_cache_dtype="fp8", kv_cache_memory=0.05, max_num_seqs=4, **settings)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    results = llm.generate([{"prompt_token_ids": p} for p in prompts()], params, use_tqdm=False)
    llm.shutdown()
    return [list(result.outputs[0].token_ids) for result in results]


@pytest.mark.parametrize("name", NAMES)
def test_the_cpu_backend_agrees_with_the_reference(checkpoint, name):
    settings = {"device": "cpu", "dtype": "float32"}
    expected = greedy(checkpoint(name), attention_backend="torch", **settings)
    assert greedy(checkpoint(name), attention_backend="cpu", **settings) == expected


def test_swapped_blocks_come_back_as_they_were(checkpoint):
    settings = {"device": "cpu", "dtype": "float32"}
    folder = checkpoint("llama3-gqa")
    expected = greedy(folder, **settings)
    assert greedy(folder, swap_space=0.01, **TIGHT, **settings) == expected


def test_the_demo_model_loses_little_and_its_cache_holds_more():
    """Measured: errors of 2.5 % of the log-probabilities' spread; 98.6 % of the likeliest tokens are the same."""
    found = compare({"device": "cpu", "dtype": "float32"}, {"kv_cache_dtype": "fp8"})
    assert 0 < found.error < 0.05
    assert found.agreement > 0.95
    assert found.blocks == pytest.approx(4, rel=0.01)


def test_old_gpus_and_flash_attn_do_not_take_it(monkeypatch):
    monkeypatch.setattr(fp8, "has_arithmetic", lambda device: False)
    assert choose_cache_dtype("auto", torch.float16, torch.device("cuda")) == torch.float16
    with pytest.raises(ConfigError, match="needs a GPU of compute capability"):
        choose_cache_dtype("fp8", torch.float16, torch.device("cuda"))
    with pytest.raises(ConfigError, match="takes no --kv-cache-dtype fp8"):
        choose_backend("flash", torch.device("cpu"), torch.float16, 64, 16, fp8_cache=True)


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("eager", [True, False])
def test_the_gpu_in_fp32_agrees_with_the_reference(checkpoint, name, eager):
    """Keys that two ways of computing leave at two sides of a middle are rare; tokens that differ by them rarer."""
    settings = {"device": "cuda", "dtype": "float32"}
    expected = greedy(checkpoint(name), attention_backend="torch", **settings)
    tokens = greedy(checkpoint(name), enforce_eager=eager, **settings)
    assert sum(ours == theirs for ours, theirs in zip(tokens, expected, strict=True)) >= 3


@pytest.mark.gpu
def test_swapped_blocks_come_back_as_they_were_on_a_gpu(checkpoint):
    settings = {"device": "cuda", "dtype": "float32", "enforce_eager": True}
    folder = checkpoint("llama3-gqa")
    expected = greedy(folder, **settings)
    tokens = greedy(folder, swap_space=0.01, **TIGHT, **settings)
    assert sum(ours == theirs for ours, theirs in zip(tokens, expected, strict=True)) >= 3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_the_demo_model_loses_little_on_a_gpu(dtype, quantization):
    change = {"kv_cache_dtype": "fp8"} | ({"quantization": quantization} if quantization else {})
    found = compare({"device": "cuda", "dtype": dtype}, change)
    assert 0 < found.error < (0.1 if quantization else 0.06)
    assert found.agreement > (0.88 if quantization else 0.93)
    assert found.blocks == pytest.approx(2, rel=0.01)
