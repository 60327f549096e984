"""Out-of-memory errors, and release of memory."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch

from tests import engines
from toolkit import LLM
from toolkit.config import CacheConfig
from toolkit.errors import OutOfMemoryError
from toolkit.hardware.memory import explain_out_of_memory
from toolkit.models.build import build_model
from toolkit.models.memory import MemoryLayout, TokenMemory
from toolkit.worker.startup.memory_budget import require_one_request_fits, require_weights_fit

PROGRAM = """
import psutil
from toolkit.hardware.memory import trim_heap
process = psutil.Process()
bytearray(30 * 2**20)  # makes later blocks up to this size come from the heap
blocks = [bytearray(8 * 2**20) for _ in range(20)]
last = bytearray(2**20)  # after them, so that the end of the heap stays in use
blocks.clear()
held = process.memory_info().rss
trim_heap()
print((held - process.memory_info().rss) // 2**20)
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc",
    reason="only glibc has malloc_trim",
)
def test_trim_heap_returns_freed_memory():
    """The program frees 20 blocks of 8 MiB."""
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert int(found.stdout) > 100


@pytest.mark.parametrize(
    "full",
    [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")],
)
def test_out_of_memory_names_its_cause_and_advice(full):
    with (
        pytest.raises(
            OutOfMemoryError,
            match=r"^Not enough memory for x \(.+ of cpu memory are free\); do y\.$",
        ),
        explain_out_of_memory("x", torch.device("cpu"), "do y"),
    ):
        raise full


def test_out_of_memory_names_its_cause_after_a_failed_capture(monkeypatch):
    """PyTorch may then refuse to empty its cache."""

    def refuse() -> None:
        raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    monkeypatch.setattr(torch.cuda, "empty_cache", refuse)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * 2**30, 2**40))
    with (
        pytest.raises(
            OutOfMemoryError, match=r"^Not enough memory for x \(3\.00 GiB of cuda memory are free"
        ),
        explain_out_of_memory("x", torch.device("cuda", 0), "do y"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


LAYOUT = MemoryLayout.of([TokenMemory.of_keys(12, 64)] * 12, 16, 2, 2)


@pytest.mark.parametrize(
    "refused",
    [
        lambda gpu: require_weights_fit(16 * 2**30, gpu, torch.bfloat16),
        lambda gpu: require_one_request_fits(CacheConfig(), 0, 1024, LAYOUT, gpu),
    ],
    ids=["weights", "cache"],
)
def test_memory_errors_name_other_programs_only_if_they_use_much(refused, monkeypatch):
    free = 8 * 2**30
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 140 * 2**30))
    reserved = 6 * 2**30
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    with pytest.raises(
        OutOfMemoryError,
        match=r"Other programs use about 126 of this GPU's 140 GiB \(nvidia-smi lists them\)\.",
    ):
        refused(torch.device("cuda", 0))
    reserved = 131 * 2**30
    with pytest.raises(OutOfMemoryError) as alone:
        refused(torch.device("cuda", 0))
    assert "ther programs" not in str(alone.value)


def test_other_errors_keep_their_type():
    with (
        pytest.raises(RuntimeError, match="shapes"),
        explain_out_of_memory("x", torch.device("cpu"), "do y"),
    ):
        raise RuntimeError("shapes do not fit")


@pytest.mark.parametrize("fails", [False, True])
def test_shutdown_frees_gpu_memory_and_logs_a_failed_gpu(checkpoint, monkeypatch, caplog, fails):
    calls = []

    def empty_cache() -> None:
        calls.append(1)
        if fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nMore of it.")

    monkeypatch.setattr("toolkit.worker.worker.empty_cache", empty_cache)
    llm = LLM(str(checkpoint("gpt2")), device="cpu", max_num_seqs=2)
    engines.worker(llm)._stream = object()  # as on a GPU
    llm.shutdown()
    llm.shutdown()
    assert calls == [1]
    warning = (
        "the GPU's memory could not be freed: CUDA error: an illegal memory access was encountered"
    )
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        warning
    ] * fails


def test_a_cache_that_does_not_fit_is_reported(checkpoint, monkeypatch):
    def full(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr("toolkit.worker.startup.runners.KVCache", full)
    with pytest.raises(
        OutOfMemoryError, match=r"enough memory for a KV cache of .*lower --kv-cache-memory"
    ):
        LLM(str(checkpoint("gpt2")), device="cpu", kv_cache_memory=0.05)


def test_weights_that_do_not_fit_are_reported(checkpoint, monkeypatch):
    def full(config, *, device, **more):
        if device.type == "cpu":
            raise MemoryError
        return build_model(config, device=device, **more)

    monkeypatch.setattr("toolkit.worker.startup.model_loader.build_model", full)
    with pytest.raises(
        OutOfMemoryError, match=r"enough memory for the model's weights .*--quantization"
    ):
        LLM(str(checkpoint("gpt2")), device="cpu", kv_cache_memory=0.05)
