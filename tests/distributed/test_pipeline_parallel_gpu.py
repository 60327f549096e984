"""Pipeline parallelism on GPUs, over NCCL: equal to Transformers. Runs with `make test-gpu`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import checkpoints
from tests.distributed.test_tensor_parallel import prompts_for
from toolkit import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

SMALL = {"num_gpu_blocks_override": 400, "max_num_seqs": 16, "dtype": "float32"}
NEW_TOKENS = 24


@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True}, {"tensor_parallel_size": 2}])
@pytest.mark.parametrize("name", ["gpt2", "llama3-gqa", "qwen3-tied"])
def test_greedy_tokens_and_logprobs_equal_transformers(
    checkpoint: Callable[[str], Path], name: str, settings: dict[str, object]
) -> None:
    if "tensor_parallel_size" in settings and torch.cuda.device_count() < 4:
        pytest.skip("needs four GPUs")
    model, prompts = checkpoints.make_reference(name), prompts_for(name)
    llm = LLM(
        str(checkpoint(name)),
        pipeline_parallel_size=2,
        max_num_batched_tokens=32,
        **SMALL | settings,
    )
    params = SamplingParams(
        temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, prompt_logprobs=0
    )
    results = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    llm.shutdown()
    for prompt, result in zip(prompts, results, strict=True):
        assert list(result.outputs[0].token_ids) == checkpoints.greedy(model, prompt, NEW_TOKENS)
        expected = checkpoints.logits(model, prompt).log_softmax(-1)
        for position, found in enumerate(result.prompt_logprobs[1:]):
            token = prompt[position + 1]
            assert found[token].logprob == pytest.approx(float(expected[position, token]), abs=1e-3)
