"""A server on a GPU: metrics, and memory for the successor of a dead engine (`make test-gpu`)."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.api.conftest import Reference
from tests.server import Server, until
from tests.serving.test_recovery import ask

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that uses the default fraction of GPU memory."""
    gc.collect()  # other tests' engines that failed to start
    torch.cuda.empty_cache()
    server = Server(str(model), "--dtype", "float32", cwd=tmp_path_factory.mktemp("gpu"))
    yield server
    server.stop()


def test_metrics_describe_the_gpu(served: Server) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # as nvidia-smi counts them
    assert served.metric("tk:gpu_memory_total_bytes", gpu=gpu) == pytest.approx(total, rel=0.05)
    assert 0.8 * total < served.metric("tk:gpu_memory_used_bytes", gpu=gpu) <= 1.05 * total
    assert 0 <= served.metric("tk:gpu_utilization_perc", gpu=gpu) <= 1
    limit = served.metric("tk:gpu_power_limit_watts", gpu=gpu)
    assert 30 < served.metric("tk:gpu_power_watts", gpu=gpu) < 1.2 * limit
    assert 15 < served.metric("tk:gpu_temperature_celsius", gpu=gpu) < 100


def test_fifty_streams_outlive_their_engine_on_a_gpu(served: Server, reference: Reference) -> None:
    prompts = [f"Story number {i}: " for i in range(50)]
    bodies = [
        {"prompt": p, "max_tokens": 4096, "temperature": 0, "ignore_eos": True} for p in prompts
    ]
    answers = asyncio.run(ask(served, bodies, kill=True))
    assert {(a.finish_reason, a.usage["completion_tokens"], a.error) for a in answers} == {
        ("length", 4096, None)
    }
    for prompt, answer in zip(prompts, answers, strict=True):
        # The last character may be incomplete in the reference.
        assert answer.text.startswith(reference.text(prompt, 96).rstrip("\ufffd"))
    assert "Traceback" not in served.stderr
    until(served.is_idle)
