"""Adapters in the GPU's runner match those of the CPU's, in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests import engines
from tests.lora.test_adapters import PROMPT, engine, generate, tokens
from tests.speculative.drafting import few_measured_steps
from toolkit import LoRARequest
from toolkit.errors import ToolkitError
from toolkit.kernels.table import TritonKernels
from toolkit.lora.gpu_weight import GPUActive, GPUAdaptedTable, GPUAdaptedWeight
from toolkit.lora.peft import Pair
from toolkit.lora.weight import Part
from toolkit.weights.kinds.plain import PlainWeight


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


def test_the_adapter_of_rows_takes_one_copy_to_addresses_of_16_bytes():
    """A kernel's result might not be there when the next kernel reads it before its wait."""
    active = GPUActive(num_slots=4, rank_block=16)
    active.place(2, 40)
    used, places, requests = active.of_rows(2, 5, torch.device("cpu"))
    assert (used.tolist(), places.tolist(), requests.tolist()) == ([1, 3, 1], [0] * 5, [0] * 5)
    assert used.untyped_storage().data_ptr() == places.untyped_storage().data_ptr()
    assert used.storage_offset() % 4 == places.storage_offset() % 4 == 0


def test_a_rank_without_tokens_has_an_empty_part_of_a_table():
    kernels = SimpleNamespace(rank_block=16)
    table = GPUAdaptedTable(
        PlainWeight(torch.zeros(0, 6)), GPUActive(1, 16), [6], 16, torch.float32, kernels, columns=0
    )
    pair = Pair(torch.randn(4, 0), torch.randn(6, 4))
    table.place(1, table.pack_parts([Part(slice(0, 6), pair)]))
    torch.testing.assert_close(table._up[0, :, :4], pair.up)
    assert table._low.shape == (1, 16, 0)


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


TORCH = {"attention_backend": "torch"}


@pytest.fixture
def use_gpu_runner(triton_runs, monkeypatch):
    """Return a function that makes engines use the runner and the kernels of a GPU."""
    if not triton_runs:
        pytest.skip("Triton was imported without its interpreter")
    from toolkit.kernels.triton.products import lora

    for name in ("PROGRAMS", "MORE_PROGRAMS"):  # the interpreter takes a millisecond for each
        monkeypatch.setattr(lora, name, 2)
    return lambda: monkeypatch.setattr(
        "toolkit.worker.worker.kernels_for", lambda _: TritonKernels()
    )


def answers(checkpoint, folders: dict[str, Path], base: str, names: list[str], **more):
    """Return (class of the kernels, answers, log-probabilities of a prompt's tokens)."""
    settings = {"max_num_batched_tokens": 7, "max_lora_rank": 20, **TORCH}
    with few_measured_steps():
        llm = engine(checkpoint(base), folders, **settings | more)
    kernels = type(engines.kernels(llm)).__name__
    prompts = [PROMPT[:9], PROMPT[:4], PROMPT[:3]]
    found = tokens(generate(llm, prompts, names, max_tokens=3))
    found += tokens(generate(llm, prompts[:1], [""], max_tokens=2))
    (scored,) = generate(llm, prompts[:1], names[:1], max_tokens=1, prompt_logprobs=0)
    llm.shutdown()
    chances = [next(iter(one.values())).logprob for one in scored.prompt_logprobs[1:]]
    return kernels, found, torch.tensor(chances)


@pytest.mark.on_cpu("True")
@pytest.mark.parametrize("drafts", [False, True])
def test_the_gpu_runner_adapts_as_the_cpu_runner(adapter, checkpoint, use_gpu_runner, drafts: bool):
    """Chunks of prompts and mixed batches: the last layer's end computes fewer rows than tokens.

    A drafter has no adapters, and does not change what they compute."""
    first, second = adapter("attention"), adapter("all")
    folders = {"first": first.folder, "second": second.folder}
    case = checkpoint, folders, first.base, ["first", "", "second"]
    expected = answers(*case)
    use_gpu_runner()
    config = {"method": "draft_model", "model": str(checkpoint(first.base))}
    actual = answers(*case, **{"speculative_config": config, "max_num_seqs": 3} if drafts else {})
    assert (expected[0], actual[0]) == ("CPUKernels", "TritonKernels")
    assert actual[1] == expected[1]
    torch.testing.assert_close(actual[2], expected[2], rtol=0, atol=1e-4)


@pytest.mark.on_cpu("ends-True")
@pytest.mark.parametrize(("name", "drafts"), [("ends", False), ("ends", True), ("tied", False)])
def test_embeddings_and_head_adapt_as_on_a_cpu(
    adapter, checkpoint, use_gpu_runner, name: str, drafts: bool
):
    """Answers of the adapter, of none, and log-probabilities of a prompt; guesses are verified."""
    one = adapter(name)
    case = checkpoint, {"one": one.folder}, one.base, ["one", "", "one"]
    expected = answers(*case)
    use_gpu_runner()
    config = {"method": "ngram", "num_speculative_tokens": 2}
    actual = answers(*case, **{"speculative_config": config, "max_num_seqs": 3} if drafts else {})
    assert actual[0] == "TritonKernels"
    assert actual[1] == expected[1]
    torch.testing.assert_close(actual[2], expected[2], rtol=0, atol=1e-4)


def test_memory_for_embeddings_is_taken_if_wanted(adapter, checkpoint, use_gpu_runner):
    use_gpu_runner()
    linear, ends = adapter("attention"), adapter("ends")
    llm = engine(checkpoint(linear.base), {"linear": linear.folder}, **TORCH)
    with pytest.raises(ToolkitError, match=r"lm_head, .* Start with --lora-embeddings"):
        llm.generate([PROMPT], lora_request=LoRARequest("ends", 2, str(ends.folder)))
    llm.shutdown()
    llm = engine(checkpoint(linear.base), {}, lora_embeddings=True, enable_lora=True, **TORCH)
    assert llm.generate([PROMPT], lora_request=LoRARequest("ends", 2, str(ends.folder)))
    llm.shutdown()
