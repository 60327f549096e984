"""Weights of integers that a GPU keeps in 16 bits, too (`make test-gpu`)."""

from __future__ import annotations

import pytest
import torch

from toolkit import LLM, SamplingParams
from toolkit.config import EngineConfig
from toolkit.demo import MODEL_DIR
from toolkit.hardware.devices import find_device
from toolkit.inventory.checkpoint import read_folder
from toolkit.inventory.estimate import estimate

SETTINGS = {"device": "cuda", "dtype": "bfloat16", "quantization": "int4", "max_num_seqs": 8}


def logprobs(llm: LLM) -> torch.Tensor:
    """Return the log-probabilities of prompts, of a step each.

    GPUs other than Hopper use what they keep for the longer one."""
    params, found = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), []
    for length in (200, 300):
        ids = list(range(5, 5 + length))
        (result,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        pairs = zip(ids[1:], result.prompt_logprobs[1:], strict=True)
        found += [entries[token].logprob for token, entries in pairs]
    return torch.tensor(found)


@pytest.mark.gpu
def test_gpu_keeps_what_was_estimated_and_computes_the_same():
    found = {}
    for name, more in (("kept", {}), ("not", {"num_gpu_blocks_override": 64})):
        settings = SETTINGS | {"gpu_memory_utilization": 0.2} | more
        checkpoint = read_folder(MODEL_DIR, "demo")
        expected = estimate(
            checkpoint, EngineConfig.from_settings(settings), find_device("cuda")
        ).expanded
        llm = LLM(str(MODEL_DIR), **settings)
        assert llm.info.expanded_weight_bytes == expected
        assert (expected > 0) == (name == "kept")
        found[name] = logprobs(llm)
        llm.shutdown()
    assert (found["kept"] - found["not"]).square().mean().sqrt() < 0.1
