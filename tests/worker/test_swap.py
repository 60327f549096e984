"""Blocks survive the copy to the host and back, in pieces of any size."""

from __future__ import annotations

import random

import pytest
import torch

from tests import engines
from toolkit import LLM
from toolkit.hardware.memory import is_fatal, is_out_of_memory
from toolkit.worker import kv_cache


@pytest.mark.parametrize("piece", [1, 10_000, 2**26])
def test_swapped_blocks_come_back_unchanged(checkpoint, monkeypatch, piece):
    monkeypatch.setattr(kv_cache, "SWAP_PIECE", piece)
    llm = LLM(
        str(checkpoint("gpt2")),
        device="cpu",
        num_gpu_blocks_override=60,
        block_size=4,
        swap_space=0.01,
    )
    cache = engines.runner(llm).caches[0]
    (parts,) = cache._tensors
    parts.copy_(torch.randn_like(parts))
    before = parts.clone()
    blocks = random.Random(piece).sample(range(60), 30)
    cache.copy_out(list(zip(blocks, range(30), strict=True)))
    parts.zero_()
    cache.copy_in(list(zip(range(30), reversed(blocks), strict=True)))
    cache.copy_in([])
    assert torch.equal(parts[:, list(reversed(blocks))], before[:, blocks])
    assert parts.abs().sum(dim=(0, 2, 3, 4)).count_nonzero() == 30


@pytest.mark.parametrize("piece", [1, 5000, 2**26])
def test_swapped_states_come_back_unchanged(checkpoint, monkeypatch, piece):
    """All parts: states, which may have another type than activations, and windows."""
    monkeypatch.setattr(kv_cache, "SWAP_PIECE", piece)
    llm = LLM(
        str(checkpoint("qwen3-next")),
        device="cpu",
        num_gpu_blocks_override=60,
        max_num_seqs=20,
        swap_space=0.001,
        dtype="float32",
        mamba_ssm_cache_dtype="bfloat16",
    )
    states, keepers = engines.runner(llm).row_states, engines.model(llm).keepers()
    parts = [part for keeper in keepers for part in getattr(keeper, "states", ())]
    for part in parts:
        part.copy_(torch.randn_like(part))
    before = [part.clone() for part in parts]
    slots = random.Random(piece).sample(range(20), 15)
    states.copy_out(list(zip(slots, range(15), strict=True)))
    for part in parts:
        part.zero_()
    states.copy_in(list(zip(range(15), reversed(slots), strict=True)))
    states.copy_in([])
    assert {part.dtype for part in parts} == {torch.float32, torch.bfloat16}
    for part, earlier in zip(parts, before, strict=True):
        assert torch.equal(part[list(reversed(slots))], earlier[slots])
        assert part.flatten(1).abs().sum(1).count_nonzero() == 15


def test_driver_errors_are_classified_by_their_text():
    full = [
        RuntimeError("CUDA error: out of memory"),
        torch.OutOfMemoryError("CUDA out of memory. Tried"),
        MemoryError(),
    ]
    broken = [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    ]
    assert all(is_out_of_memory(error) and not is_fatal(error) for error in full)
    assert all(is_fatal(error) and not is_out_of_memory(error) for error in broken)
    assert not is_fatal(ValueError("a bad step"))
