"""Norms and residual sums on CPUs, against the reference."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import joins
from toolkit.kernels import cpu, reference
from toolkit.kernels.cpu.norm import Join, RowNorm
from toolkit.kernels.cpu.program import Recorder
from toolkit.kernels.reference import Norm

pytestmark = pytest.mark.skipif(not cpu.available(), reason=str(cpu.problem()))
FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("variant", cpu.variants())
@pytest.mark.parametrize("join", joins.JOINS, ids=str)
@pytest.mark.parametrize(
    ("rows", "size", "dtype", "mean"),
    [
        (1, 768, FP32, 30.0),  # far from 0, sums of squares would lose the variance
        (3, 1, BF16, 1.0),
        (5, 7, BF16, 30.0),
        (16, 100, FP32, 0.0),
        (2, 4099, BF16, 0.0),
        (300, 768, FP32, 1.0),
    ],
    ids=str,
)
def test_joins_equal_reference(rows, size, dtype, mean, join, variant) -> None:
    device = torch.device("cpu")
    (x, residual, norms), options = joins.make_join(join, rows, size, dtype, device, mean)
    own = None if residual is None else residual.clone()
    with cpu.using(variant):
        factor = 1.0 if options["factor"] is None else float(options["factor"])
        prepared = Join(size, norms, options["post"], options["scale"], factor)
        found, total = prepared(x, own, options["other"])
    expected, expected_total = reference.join(x, residual, norms, **options)
    tolerance = 2e-5 if dtype == FP32 else 2e-2
    assert len(found) == len(expected)
    for normed, one in zip(found, expected, strict=True):
        torch.testing.assert_close(normed, one, atol=tolerance * (1 + mean), rtol=tolerance)
    is_exact = join == joins.Join(join.residual, join.norms)
    error = 0 if is_exact else tolerance
    torch.testing.assert_close(total, expected_total, atol=error * (1 + mean), rtol=error)
    assert total is (own if join.residual else x)


@pytest.mark.parametrize("variant", cpu.variants())
@pytest.mark.parametrize(("rows", "size", "dtype"), [(1, 7, FP32), (40, 768, BF16)], ids=str)
def test_rows_are_normed_in_place(rows, size, dtype, variant) -> None:
    torch.manual_seed(0)
    weight, wide = torch.randn(size), torch.randn(rows, 3 * size).to(dtype)
    expected = wide.clone()
    reference.rms_norm_rows(expected[:, size : 2 * size], weight, 1e-5)
    norm = RowNorm(weight, 1e-5)
    with cpu.using(variant):
        program, _ = Recorder().record(lambda: norm(wide[:, size : 2 * size]))
    assert len(program) == 1
    tolerance = 2e-5 if dtype == FP32 else 2e-2
    torch.testing.assert_close(wide, expected, atol=tolerance, rtol=tolerance)


def test_unsupported_inputs_are_errors() -> None:
    rms = Norm(torch.zeros(8), None, 1e-5, False)
    join, x = Join(8, [rms]), torch.zeros(2, 8)
    for other in (torch.zeros(2, 9), torch.zeros(8), x.half()):
        with pytest.raises(ValueError, match="x must be"):
            join(other, None)
    for other in (x.bfloat16(), torch.zeros(3, 8), torch.zeros(8, 2).T):
        with pytest.raises(ValueError, match="the rows must be"):
            join(x, other)
    with pytest.raises(ValueError, match="need a residual"):
        join(x, None, x)
    with pytest.raises(ValueError, match="each row contiguous"):
        RowNorm(torch.zeros(8), 1e-5)(torch.zeros(8, 8).T)
    with pytest.raises(ValueError, match=r"must be \[7\]"):
        Join(7, [rms])
