"""Norms on CPUs, against the reference."""

from __future__ import annotations

import pytest
import torch

from toolkit.kernels import cpu, reference
from toolkit.kernels.cpu.norm import Norm

pytestmark = pytest.mark.skipif(not cpu.available(), reason=str(cpu.problem()))


@pytest.mark.parametrize("variant", cpu.variants())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 768), (3, 1), (5, 7), (16, 100), (2, 4099), (300, 768)], ids=str
)
def test_norms_equal_reference(shape: tuple[int, int], dtype: torch.dtype, variant: str) -> None:
    torch.manual_seed(0)
    size = shape[1]
    weight, bias = torch.randn(2, size).to(dtype)
    for offset in (0.0, 30.0):  # far from 0, sums of squares would lose the variance
        x = (torch.randn(shape) + offset).to(dtype)
        for residual in (None, torch.randn(shape).to(dtype)):
            for name, parameters in (
                ("add_rms_norm", (weight, None)),
                ("add_layer_norm", (weight, bias)),
            ):
                own = None if residual is None else residual.clone()
                with cpu.using(variant):
                    normed, total = Norm(*parameters, 1e-5)(x, own)
                given = [part for part in parameters if part is not None]
                expected, expected_total = getattr(reference, name)(x, residual, *given, 1e-5)
                tolerance = 2e-5 if dtype == torch.float32 else 2e-2
                torch.testing.assert_close(
                    normed, expected, atol=tolerance * (1 + offset), rtol=tolerance
                )
                assert total.equal(expected_total)
                assert own is None or total is own


def test_unsupported_inputs_are_errors() -> None:
    norm, x = Norm(torch.zeros(8), None, 1e-5), torch.zeros(2, 8)
    for other in (torch.zeros(2, 9), torch.zeros(8, 2).T, torch.zeros(8), x.bfloat16()):
        with pytest.raises(ValueError, match="x must be"):
            norm(other, None)
    with pytest.raises(ValueError, match="the residual must be like x"):
        norm(x, x.bfloat16())
    with pytest.raises(ValueError, match="of one size"):
        Norm(torch.zeros(8), torch.zeros(7), 1e-5)
    with pytest.raises(ValueError, match="of one size"):
        Norm(torch.zeros(8).half(), None, 1e-5)
