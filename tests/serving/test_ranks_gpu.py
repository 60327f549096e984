"""Servers on two GPUs: a process dies or hangs, and no answer is lost (`make test-gpu`)."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pynvml
import pytest
import torch

from tests.api.conftest import Reference
from tests.server import Process, Server, gone, until
from tests.serving.test_ranks import BODIES, PROMPTS, TOKENS
from tests.serving.test_recovery import streamed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

LAYOUTS = ("tensor", "pipeline", "data")


def flags(layout: str) -> tuple[str, ...]:
    return (f"--{layout}-parallel-size", "2", "--dtype", "float32", "--kv-cache-memory", "0.05")


@pytest.fixture(scope="module", params=LAYOUTS)
def served(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Server]]:
    """Return the layout and its server."""
    layout, folder = request.param, tmp_path_factory.mktemp("ranks")
    server = Server(str(model), *flags(layout), "--worker-timeout", "4", cwd=folder)
    yield layout, server
    server.stop()


def victim(layout: str, server: Server) -> psutil.Process:
    """Return the process to harm: the second rank, or the second of two engines."""
    if layout == "data":
        return server.cores[1]
    children = server.cores[0].children()
    return next(one for one in children if "toolkit.executor.rank" in one.cmdline())


def used_bytes(server: Server) -> int:
    """Return the memory of all GPUs that the server's processes use."""
    pynvml.nvmlInit()
    ours = {one.pid for one in psutil.Process(server.pid).children(recursive=True)}
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    running = [pynvml.nvmlDeviceGetComputeRunningProcesses(handle) for handle in handles]
    return sum(one.usedGpuMemory or 0 for gpu in running for one in gpu if one.pid in ours)


@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_streams_survive_on_gpus(
    served: tuple[str, Server], reference: Reference, harm: signal.Signals
) -> None:
    layout, server = served
    process, before = victim(layout, server), used_bytes(server)
    answers = asyncio.run(streamed(server, BODIES, lambda: process.send_signal(harm)))
    assert {a.error for a in answers} == {None}
    assert [a.text for a in answers] == reference.texts(PROMPTS, TOKENS)
    assert "Traceback" not in server.stderr
    until(lambda: gone(process))
    until(lambda: len(server.cores) == (2 if layout == "data" else 1))
    server.await_health()
    again = asyncio.run(streamed(server, BODIES, None))
    assert [a.text for a in again] == reference.texts(PROMPTS, TOKENS)
    if before == 0:
        pytest.skip("NVML does not show the memory of processes here")
    assert used_bytes(server) <= 1.1 * before


def test_too_few_gpus_are_one_error(model: Path, tmp_path: Path) -> None:
    process = Process(
        "serve", str(model), "--port", "0", *flags("tensor"), cwd=tmp_path, CUDA_VISIBLE_DEVICES="0"
    )
    assert process.wait() != 0
    assert "Traceback" not in process.stderr
    assert "--tensor-parallel-size 2 needs as many GPUs, and PyTorch sees 1 here" in process.stderr


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_nccl_that_cannot_start_is_one_error(model: Path, tmp_path: Path, layout: str) -> None:
    process = Process(
        "serve", str(model), "--port", "0", *flags(layout), cwd=tmp_path, NCCL_SOCKET_IFNAME="=none"
    )
    assert process.wait() != 0
    assert "Traceback" not in process.stderr
    assert process.stderr.count("NCCL cannot connect the GPUs") == 1
