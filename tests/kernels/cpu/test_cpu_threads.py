"""The CPU kernels' thread pool."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from toolkit.kernels import cpu

if not cpu.available():
    pytest.skip(f"the CPU kernels: {cpu.problem()}", allow_module_level=True)

from toolkit.kernels.cpu.linear import PackedLinear


@pytest.fixture(autouse=True)
def three_threads():
    before = cpu.num_threads()
    cpu.set_num_threads(3)
    yield
    cpu.set_num_threads(before)


def layer() -> tuple[PackedLinear, torch.Tensor, torch.Tensor]:
    """Return (a layer of many tasks, x, expected result)."""
    weight, x = torch.randn(2000, 64), torch.randn(3, 64)
    return PackedLinear(weight), x, x @ weight.T


def test_concurrent_callers_take_turns():
    linear, x, expected = layer()
    right: list[bool] = []

    def call() -> None:
        right.append(all(torch.allclose(linear(x), expected, atol=1e-4) for _ in range(200)))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert right == [True] * 4


def test_the_number_of_threads_may_change_between_calls():
    linear, x, expected = layer()
    for count in (1, 4, 2, 1, 3):
        cpu.set_num_threads(count)
        assert cpu.num_threads() == count
        torch.testing.assert_close(linear(x), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", [1, 20, 300])
@pytest.mark.parametrize("columns", [20, 100, 500])
def test_products_are_complete_for_any_number_of_threads(rows, columns):
    weight, x = torch.randn(columns, 64), torch.randn(rows, 64)
    linear = PackedLinear(weight)
    for count in (1, 2, 3, 7):
        cpu.set_num_threads(count)
        for _ in range(20):
            torch.testing.assert_close(linear(x), x @ weight.T, atol=1e-4, rtol=1e-4)


def test_idle_threads_use_no_cpu_time():
    linear, x, _ = layer()
    linear(x)
    time.sleep(0.05)  # far longer than they spin
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.05
