"""Ranks whose devices differ."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from toolkit import LLM
from toolkit.errors import ConfigError
from toolkit.executor import rank_devices as devices
from toolkit.executor.local_ranks import RankChild
from toolkit.executor.rank_devices import DeviceReport, require_alike

pytestmark = pytest.mark.usefixtures("forked_processes")

H200 = DeviceReport("NVIDIA H200", "9.0", 132, 140 * 2**30)


def test_gpus_of_different_kinds_are_refused() -> None:
    a100 = DeviceReport("NVIDIA A100", "8.0", 108, 80 * 2**30)
    message = (
        r"rank 0, rank 1: NVIDIA H200 \(compute capability 9\.0, 132 multiprocessors\); "
        r"rank 2 on 10\.0\.0\.2: NVIDIA A100 \(compute capability 8\.0, 108 multiprocessors\)\."
    )
    with pytest.raises(ConfigError, match=message):
        require_alike({"rank 0": H200, "rank 1": H200, "rank 2 on 10.0.0.2": a100})
    with pytest.raises(ConfigError, match="CPU"):
        require_alike({"rank 0": H200, "rank 1": DeviceReport("CPU")})


def test_gpus_that_differ_only_in_memory_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    def warnings(memory: float) -> list[str]:
        caplog.clear()
        other = DeviceReport(
            "NVIDIA H200 NVL", H200.capability, H200.multiprocessors, int(memory * 2**30)
        )
        with caplog.at_level(logging.WARNING):
            require_alike({"rank 0": H200, "rank 1": other})
        return caplog.messages

    assert warnings(140) == warnings(139.5) == [], "drivers reserve some"
    [line] = warnings(96)
    assert "rank 0: 140.00 GiB; rank 1: 96.00 GiB" in line


def test_devices_are_compared_before_ranks_load(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank waits for the first and reads no message, so it is killed at once."""
    monkeypatch.setattr(devices, "report", lambda wanted, rank: H200)
    seconds: list[float] = []  # that each rank gets to end by itself
    end = RankChild.end

    def record(rank: RankChild, patience: float) -> None:
        seconds.append(patience)
        end(rank, patience)

    monkeypatch.setattr(RankChild, "end", record)
    with pytest.raises(ConfigError, match=r"rank 0: NVIDIA H200 .*; rank 1: CPU"):
        LLM(
            str(checkpoint("llama3-gqa")), device="cpu", tensor_parallel_size=2, load_format="dummy"
        )
    assert seconds == [0.1]
