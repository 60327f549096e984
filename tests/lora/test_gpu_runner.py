"""Adapters in the GPU's runner match those of the CPU's, in Triton's interpreter."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.lora.test_adapters import PROMPT, engine, generate, tokens
from toolkit.kernels.table import Kernels
from toolkit.lora.gpu_weight import GPUActive, GPUAdaptedWeight
from toolkit.lora.peft import Pair
from toolkit.lora.weight import Part
from toolkit.weights.plain import PlainWeight


def test_adapters_in_use_are_numbered_by_first_appearance():
    active = GPUActive(num_slots=4, rank_block=16)
    for slot, rank in ((1, 8), (2, 40), (4, 16)):
        active.place(slot, rank)
    index, used = np.full((2, 6), 99, np.int32)
    for slots, expected in (
        ([4, 0, 1, 4], ([0, -1, 1, 0, -1, -1], [2, 1, 3, 0, 0, 0])),
        ([2, 0], ([0, -1, -1, -1, -1, -1], [1, 3, 1, 0, 0, 0])),
        ([0, 0], ([-1] * 6, [0] * 6)),
    ):
        active.pack(np.array(slots, np.int32), index, used)
        assert (index.tolist(), used.tolist()) == expected


def test_a_slot_holds_the_factors_of_its_adapter_only():
    """Ranks differ, some parts have no adapter, and the adapter before had more of both."""
    torch.manual_seed(0)
    counts, columns = [4, 2, 6], 10
    base = PlainWeight(torch.zeros(12, columns))
    kernels = SimpleNamespace(rank_block=16)
    weight = GPUAdaptedWeight(base, GPUActive(2, 16), counts, 40, torch.float32, kernels)
    weight.multiply(0.5, slice(6, 12))
    firsts = [0, 4, 6]

    def parts(ranks: list[int]) -> list[Part]:
        return [
            Part(
                slice(first, first + count),
                Pair(torch.randn(rank, columns), torch.randn(count, rank), scale=1.5),
            )
            for first, count, rank in zip(firsts, counts, ranks, strict=True)
            if rank
        ]

    for ranks in ([40, 40, 40], [3, 0, 20], [16, 16, 16]):
        given = parts(ranks)
        weight.place(2, weight.pack_parts(given))
        expected = torch.zeros(12, columns)
        for rows, pair in given:
            expected[rows] = pair.up @ pair.low * 1.5
        expected[6:] *= 0.5
        low = weight._low[1].view(len(counts), -1, columns)
        found = [
            weight._up[1][first : first + n] @ low[i]
            for i, (first, n) in enumerate(zip(firsts, counts, strict=True))
        ]
        torch.testing.assert_close(torch.cat(found), expected)
        assert weight._blocks[1] == -(-max(ranks) // 16)
    assert not weight._up[0].any()
    weight.place(2, [])
    assert weight._blocks[1] == 0


@pytest.mark.parametrize("drafts", [False, True])
def test_the_gpu_runner_adapts_as_the_cpu_runner(
    adapter, checkpoint, triton_runs, monkeypatch, drafts: bool
):
    """Chunks of prompts and mixed batches: the last layer's end computes fewer rows than tokens.

    A drafter has no adapters, and does not change what they compute."""
    if not triton_runs:
        pytest.skip("Triton was imported without its interpreter")
    from toolkit.kernels.triton.products import lora

    for name in ("PROGRAMS", "MORE_PROGRAMS"):  # the interpreter takes a millisecond for each
        monkeypatch.setattr(lora, name, 2)
    first, second = adapter("attention"), adapter("all")
    folders = {"first": first.folder, "second": second.folder}
    prompts = [PROMPT[:9], PROMPT[:4], PROMPT[:3]]

    def answers(**more) -> tuple[str, list[list[int]]]:
        settings = {"max_num_batched_tokens": 7, "max_lora_rank": 20, "attention_backend": "torch"}
        llm = engine(checkpoint(first.base), folders, **settings | more)
        runner = type(llm._core.executor._worker.runner).__name__
        found = tokens(generate(llm, prompts, ["first", "", "second"], max_tokens=3))
        found += tokens(generate(llm, prompts[:1], [""], max_tokens=2))
        llm.shutdown()
        return runner, found

    expected = answers()
    monkeypatch.setattr("toolkit.worker.worker.kernels_for", lambda device: Kernels())
    config = {"method": "draft_model", "model": str(checkpoint(first.base))}
    actual = answers(**{"speculative_config": config, "max_num_seqs": 3} if drafts else {})
    assert (expected[0], actual[0]) == ("ModelRunner", "CudaRunner")
    assert actual[1] == expected[1]
