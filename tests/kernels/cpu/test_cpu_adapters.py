"""Products with LoRA adapters, in all variants that run on this machine, against PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from toolkit.kernels import cpu, reference

if not cpu.available():
    pytest.skip(f"the CPU kernels: {cpu.problem()}", allow_module_level=True)

from toolkit.kernels.cpu.adapters import AdaptedProduct, Part, StepSlots
from toolkit.kernels.cpu.linear import PackedLinear

pytestmark = pytest.mark.usefixtures("variant", "num_threads")

NUM_SLOTS, MAX_RANKS = 4, 40
CASES = [
    # rows of x, of the weight, columns, type, activation, gated
    (1, 32, 16, torch.float32, None, False),
    (3, 51, 7, torch.float32, "silu", False),
    (5, 98, 33, torch.bfloat16, "gelu_tanh", True),
    (17, 1158, 257, torch.float32, "silu", True),
    (9, 1100, 130, torch.bfloat16, None, False),
    (40, 34, 65, torch.float32, "relu2", True),
    (2, 1200, 2050, torch.float32, "gelu", False),
]


def make_parts(rows: int, columns: int) -> dict[int, list[Part]]:
    """Return adapters of three slots: of all rows, of three ranges of rows, and of few."""

    def part(first: int, count: int, rank: int) -> Part:
        low, up = torch.randn(rank, columns) * columns**-0.5, torch.randn(rank, count)
        return Part(first, low, up)

    third = rows // 3
    several = [part(0, third, 3), part(third, third, 8), part(2 * third, rows - 2 * third, 5)]
    return {1: [part(0, rows, 16)], 2: several, 4: [part(rows - 3, 2, 1)]}


def expected(x, weight, bias, activation, gated, slots, parts) -> torch.Tensor:
    """Compute it in fp64."""
    sums = x.double() @ weight.double().T + bias.double()
    for row, slot in enumerate(slots.tolist()):
        for first, low, up in parts.get(slot, ()):
            sums[row, first : first + up.shape[1]] += up.double().T @ (
                low.double() @ x[row].double()
            )
    if gated:
        sums, up = sums.chunk(2, 1)
    if activation is not None:
        sums = reference.ACTIVATIONS[activation](sums)
    return sums * up if gated else sums


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_token_has_its_adapter(case):
    num_tokens, rows, columns, dtype, activation, gated = case
    torch.manual_seed(rows)
    weight, bias = torch.randn(rows, columns) * columns**-0.5, torch.randn(rows)
    x, weight = torch.randn(num_tokens, columns, dtype=dtype), weight.to(dtype)
    step, parts = StepSlots(), make_parts(rows, columns)
    product = PackedLinear(weight, bias, activation=activation, gated=gated)
    adapted = AdaptedProduct(product, step, NUM_SLOTS, MAX_RANKS)
    slots = np.arange(num_tokens, dtype=np.int32) % (NUM_SLOTS + 1)  # nothing is in the third
    for slot, several in parts.items():
        adapted.place(slot, several)
    for order in (slots, slots[::-1], np.zeros_like(slots), np.full_like(slots, 2)):
        step.set(order, order[:0])
        tolerance = {torch.float32: 2e-4, torch.bfloat16: 2e-2}
        for result, atol in tolerance.items():
            found = adapted(x, x, result)
            assert found.dtype == result
            exact = expected(x, weight, bias, activation, gated, order, parts)
            torch.testing.assert_close(found.double(), exact, atol=atol, rtol=atol)


def test_the_end_of_a_step_has_the_adapters_of_its_tokens():
    """Adapters that replace others count from the next call on."""
    torch.manual_seed(0)
    weight, bias, x = torch.randn(20, 8), torch.zeros(20), torch.randn(2, 8)
    step, parts = StepSlots(), make_parts(20, 8)
    adapted = AdaptedProduct(PackedLinear(weight, bias), step, NUM_SLOTS, MAX_RANKS)
    adapted.place(1, parts[1])
    for placed in (parts[1], parts[2], []):
        adapted.place(2, placed)
        step.set(np.array([0, 1, 1, 2], np.int32), np.array([1, 2], np.int32))
        exact = expected(x, weight, bias, None, False, np.array([1, 2]), {1: parts[1], 2: placed})
        torch.testing.assert_close(adapted(x, x, torch.float32).double(), exact, atol=1e-4, rtol=0)


def test_factors_of_other_sizes_are_refused():
    adapted = AdaptedProduct(PackedLinear(torch.ones(20, 8)), StepSlots(), NUM_SLOTS, MAX_RANKS)
    low, up = torch.ones(2, 8), torch.ones(2, 20)
    for wrong in (
        Part(1, low, up),
        Part(0, low, up.double()),
        Part(0, torch.ones(2, 9), up),
        Part(0, low, torch.ones(20, 2).T),
    ):
        with pytest.raises(ValueError, match="do not fit a weight of 20 rows"):
            adapted.place(1, [wrong])
    with pytest.raises(ValueError, match="at most 40 ranks"):
        adapted.place(1, [Part(0, torch.ones(41, 8), torch.ones(41, 20))])
