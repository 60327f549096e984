"""The progress of reading weights, in the log."""

from __future__ import annotations

import io
import logging
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from tests.conftest import restored_logging
from toolkit.distributed import Shard
from toolkit.logs import PROGRESS, LogStyle
from toolkit.weights.loading import safetensors
from toolkit.weights.loading.progress import Progress
from toolkit.weights.slots import Slot


@pytest.fixture
def clock() -> SimpleNamespace:
    return SimpleNamespace(now=100.0)


def test_a_bar_has_bytes_rate_and_the_time_left(caplog, clock):
    progress = Progress(8 << 30, lambda: clock.now)
    with caplog.at_level(logging.INFO):
        for _ in range(8):
            clock.now += 1.0
            progress.add(1 << 30)
    assert caplog.messages == [
        "weights [#######-------------] 38% of 8.00 GiB, 1.00 GiB/s, 5 s left",
        "weights [###############-----] 75% of 8.00 GiB, 1.00 GiB/s, 2 s left",
        "weights [####################] 100% of 8.00 GiB, 1.00 GiB/s, 8 s",
    ]


def test_a_bar_is_drawn_in_place_on_a_terminal(caplog, clock, monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(PROGRESS, "handlers", [])
    monkeypatch.setattr(PROGRESS, "disabled", True)
    with restored_logging():
        LogStyle("info").apply()
        progress = Progress(1 << 30, lambda: clock.now)
        for _ in range(4):
            clock.now += 0.25
            progress.add(1 << 28)
    shown = terminal.getvalue().split("\r")[1:]
    assert shown[0] == "weights [#####---------------] 25% of 1.00 GiB, 1.00 GiB/s, 1 s left\x1b[K"
    assert (len(shown), shown[-1]) == (4, "\x1b[K")
    assert not [one for one in caplog.records if one.name != PROGRESS.name]


def test_what_takes_little_time_is_not_shown(caplog, clock):
    progress = Progress(2, lambda: clock.now)
    with caplog.at_level(logging.INFO):
        clock.now += 2.9
        progress.add(2)
    assert not caplog.messages


@pytest.mark.parametrize("pinned", [False, None], ids=["buffered", "mapped"])
def test_bytes_are_those_that_are_read(tmp_path, monkeypatch, pinned):
    """One tensor is a part, of rows and columns."""
    counts: list[list[int]] = []

    class Counted:
        def __init__(self, total: int) -> None:
            counts.append([total])

        def add(self, num_bytes: int) -> None:
            counts[-1].append(num_bytes)

    monkeypatch.setattr(safetensors, "Progress", Counted)
    tensors = {"a": torch.randn(6, 8), "b": torch.randn(3), "c": torch.randn(())}
    save_file(tensors, tmp_path / "model.safetensors")
    stored = safetensors.read_header(tmp_path / "model.safetensors")
    tensors["a"] = tensors["a"][2:5, 4:6]
    region = Shard(6, 2, 3), Shard(8, 4, 2)
    stored = [one.part(region) if one.name == "a" else one for one in stored]
    targets = {name: torch.zeros(tensor.shape) for name, tensor in tensors.items()}
    given = [(tensor, Slot(targets[tensor.name])) for tensor in stored]
    if pinned is None:
        safetensors.read_mapped(given)
    else:
        safetensors.read_buffered(given, pinned=pinned)
    assert all(torch.equal(targets[name], tensor) for name, tensor in tensors.items())
    ((total, *parts),) = counts
    assert total == sum(parts) == 4 * (6 + 3 + 1)
