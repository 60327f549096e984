"""The benchmark of a decode step's layers, on a CPU."""

from __future__ import annotations

import pytest
import torch

from toolkit.demo import MODEL_DIR
from toolkit.kernels import cpu
from tools.bench import layers


def test_each_number_of_requests_has_a_time():
    times = layers.measure(MODEL_DIR, [1, 3], context=20, layers=2, dtype="auto")
    assert list(times) == [1, 3]
    assert all(0 < seconds < 1 for seconds in times.values())


@pytest.mark.skipif(not cpu.available(), reason=cpu.problem() or "")
def test_kernels_use_as_many_threads_as_pytorch():
    before, pytorch = cpu.num_threads(), torch.get_num_threads()
    try:
        cpu.set_num_threads(1)
        torch.set_num_threads(2)
        layers.measure(MODEL_DIR, [1], context=20, layers=1, dtype="auto")
        assert cpu.num_threads() == 2
    finally:
        torch.set_num_threads(pytorch)
        cpu.set_num_threads(before)
