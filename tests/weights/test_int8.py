"""Linear layers in int8 on a CPU: supported cases, and loss of accuracy."""

from __future__ import annotations

import pytest
import torch

from tests.weights.accuracy import compare
from toolkit import LLM, SamplingParams
from toolkit.errors import ConfigError
from toolkit.kernels import cpu
from toolkit.weights.kinds import int8
from toolkit.weights.quantization import require

CPU = {"device": "cpu", "dtype": "float32"}
needs_kernels = pytest.mark.skipif(not cpu.available(), reason=f"the CPU kernels: {cpu.problem()}")


@needs_kernels
def test_int8_loses_little_and_takes_a_quarter_of_the_memory():
    """Measured: error 3.0 % of the log-probabilities' standard deviation, 97.3 % of the likeliest
    tokens unchanged, perplexity 1.2 % higher.
    """
    found = compare(CPU, {"quantization": "int8"})
    assert 0 < found.error < 0.05
    assert found.agreement > 0.95
    assert found.perplexity < 1.02
    assert found.weight_bytes < 0.3


@needs_kernels
def test_bfloat16_loses_less_than_int8():
    """Measured: error 0.9 %, 99.3 % of the tokens unchanged, perplexity 0.2 % lower."""
    found = compare(CPU, {"dtype": "bfloat16"})
    assert 0 < found.error < 0.03
    assert found.agreement > 0.97
    assert found.perplexity < 1.01


@needs_kernels
@pytest.mark.parametrize("name", ["gpt2", "llama3-gqa", "qwen3", "mistral-window"])
def test_tokens_are_the_same_alone_and_in_a_batch(checkpoint, name):
    llm = LLM(
        str(checkpoint(name)), quantization="int8", kv_cache_memory=0.004, max_num_seqs=4, **CPU
    )
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(range(3, 3 + n))} for n in (5, 40, 17)]
    together = llm.generate(prompts, params, use_tqdm=False)
    alone = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
    llm.shutdown()
    assert [r.outputs[0].token_ids for r in together] == [r.outputs[0].token_ids for r in alone]


def test_int8_is_refused_where_unsupported(monkeypatch):
    with pytest.raises(ConfigError, match=r"is for CPUs.*--quantization fp8"):
        require("int8", torch.device("cuda"), torch.bfloat16)
    with pytest.raises(ConfigError, match="activations in float32 or bfloat16"):
        require("int8", torch.device("cpu"), torch.float16)
    monkeypatch.setattr(int8.cpu, "available", lambda: False)
    monkeypatch.setattr(int8.cpu, "problem", lambda: "they were not built: there is no compiler")
    with pytest.raises(ConfigError, match="needs the CPU kernels, and they were not built"):
        require("int8", torch.device("cpu"), torch.float32)
