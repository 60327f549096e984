"""Memory of the host."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch

from toolkit import LLM
from toolkit.errors import OutOfMemoryError
from toolkit.hardware.memory import room_for
from toolkit.models.build import build_model
from toolkit.worker.memory_budget import require_one_request_fits, require_weights_fit

PROGRAM = """
import psutil
from toolkit.hardware.memory import give_back
process = psutil.Process()
bytearray(30 * 2**20)  # from then on blocks up to this size are of the heap
blocks = [bytearray(8 * 2**20) for _ in range(20)]
last = bytearray(2**20)  # behind them, so that the heap's end stays where it is
blocks.clear()
held = process.memory_info().rss
give_back()
print((held - process.memory_info().rss) // 2**20)
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc",
    reason="other C libraries keep nothing, or have no way to say so",
)
def test_what_was_freed_is_given_back():
    """20 blocks of 8 MiB."""
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert int(found.stdout) > 100


@pytest.mark.parametrize(
    "full",
    [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")],
)
def test_what_there_was_no_room_for_is_named_with_what_to_do(full):
    with (
        pytest.raises(
            OutOfMemoryError,
            match=r"^There is no room for x \(.+ of cpu memory are free\); do y\.$",
        ),
        room_for("x", torch.device("cpu"), "do y"),
    ):
        raise full


def test_what_there_was_no_room_for_is_named_even_where_nothing_is_given_back_any_more(monkeypatch):
    """As after a graph whose capture broke."""

    def refuse() -> None:
        raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    monkeypatch.setattr(torch.cuda, "empty_cache", refuse)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * 2**30, 2**40))
    with (
        pytest.raises(
            OutOfMemoryError, match=r"^There is no room for x \(3\.00 GiB of cuda memory are free"
        ),
        room_for("x", torch.device("cuda", 0), "do y"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize(
    "refused",
    [
        lambda gpu: require_weights_fit(16 * 2**30, gpu, torch.bfloat16),
        lambda gpu: require_one_request_fits(0, 16, 1024, 36864, gpu),
    ],
    ids=["weights", "cache"],
)
def test_a_gpu_that_other_programs_fill_is_told_from_one_that_is_too_small(refused, monkeypatch):
    free = 8 * 2**30
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 140 * 2**30))
    reserved = 6 * 2**30
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    with pytest.raises(
        OutOfMemoryError,
        match=r"Other programs have some 126 of this GPU's 140 GiB \(nvidia-smi lists them\)\.",
    ):
        refused(torch.device("cuda", 0))
    reserved = 131 * 2**30
    with pytest.raises(OutOfMemoryError) as alone:
        refused(torch.device("cuda", 0))
    assert "ther programs" not in str(alone.value)


def test_other_failures_stay_what_they_are():
    with pytest.raises(RuntimeError, match="shapes"), room_for("x", torch.device("cpu"), "do y"):
        raise RuntimeError("shapes do not fit")


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_gives_a_gpus_memory_back_and_survives_one_that_has_failed(
    checkpoint, monkeypatch, caplog, fails
):
    calls = []

    def empty_cache() -> None:
        calls.append(1)
        if fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nMore of it.")

    monkeypatch.setattr("toolkit.worker.worker.empty_cache", empty_cache)
    llm = LLM(str(checkpoint("gpt2")), device="cpu", max_num_seqs=2)
    llm._core.executor._worker._stream = object()  # as on a GPU
    llm.shutdown()
    llm.shutdown()
    assert calls == [1]
    said = [
        "the GPU's memory could not be given back: CUDA error: an illegal memory access was encountered"
    ]
    assert [
        record.getMessage() for record in caplog.records if record.levelname == "WARNING"
    ] == said * fails


def test_a_cache_that_there_is_no_room_for(checkpoint, monkeypatch):
    def full(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr("toolkit.worker.worker.KVCache", full)
    with pytest.raises(
        OutOfMemoryError, match=r"no room for a KV cache of .* and 0\.0 MiB of swap space"
    ):
        LLM(str(checkpoint("gpt2")), device="cpu", kv_cache_memory=0.05)


def test_weights_that_there_is_no_room_for(checkpoint, monkeypatch):
    def full(config, folder, *, device, **more):
        if device.type == "cpu":
            raise MemoryError
        return build_model(config, folder, device=device, **more)

    monkeypatch.setattr("toolkit.worker.worker.build_model", full)
    with pytest.raises(OutOfMemoryError, match=r"no room for the model's weights .*--quantization"):
        LLM(str(checkpoint("gpt2")), device="cpu", kv_cache_memory=0.05)
