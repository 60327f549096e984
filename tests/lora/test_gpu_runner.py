"""Adapters in the GPU's runner match those of the CPU's, in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest

from tests.lora.test_adapters import PROMPT, engine, generate, tokens
from toolkit.kernels.table import Kernels
from toolkit.lora.gpu_weight import GPUActive


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
