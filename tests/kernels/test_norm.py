"""Fused sums and norms: the reference against PyTorch, Triton against the reference."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.kernels import reference

EPS = 1e-5
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Relative: one or two units in the last place.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 2e-2}
NAN = float("nan")


@pytest.fixture(scope="session")
def norm(triton):
    from toolkit.kernels.triton import norm

    return norm


def rows(
    num_tokens: int, size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """Return x, residual, weight, bias. Mean and variance of x are far from 0 and 1."""
    torch.manual_seed(num_tokens * size)
    x, residual = (3 * torch.randn(2, num_tokens, size) + 1).to(dtype).to(device)
    weight, bias = torch.randn(2, size).to(dtype).to(device)
    return x, residual, weight, bias


def apply(
    module, kind: str, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, **options
):
    if kind == "rms":
        return module.add_rms_norm(x, residual, weight, EPS, **options)
    return module.add_layer_norm(x, residual, weight, bias, EPS, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reference_equals_pytorch(dtype):
    x, residual, weight, bias = rows(5, 48, dtype, torch.device("cpu"))
    normed, total = reference.add_rms_norm(x, residual, weight, EPS)
    torch.testing.assert_close(total, x + residual, rtol=0, atol=0)
    expected = F.rms_norm(total.float(), (48,), weight.float(), EPS).to(dtype)
    torch.testing.assert_close(normed, expected, rtol=TOLERANCE[dtype], atol=1e-5)
    normed, total = reference.add_layer_norm(x, None, weight, bias, EPS)
    assert total is x
    expected = F.layer_norm(x.float(), (48,), weight.float(), bias.float(), EPS).to(dtype)
    torch.testing.assert_close(normed, expected, rtol=TOLERANCE[dtype], atol=1e-5)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize(
    ("num_tokens", "size"), [(1, 1), (3, 7), (1, 768), (2, 1000), (1, 4096), (2, 16384)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_triton_equals_reference(norm, device, dtype, num_tokens, size, with_residual, kind):
    x, residual, weight, bias = rows(num_tokens, size, dtype, device)
    given = residual if with_residual else None
    expected, expected_total = apply(reference, kind, x, given, weight, bias)
    before = x.clone()
    normed, total = apply(norm, kind, x, given, weight, bias)
    torch.testing.assert_close(normed, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    truncates = device.type == "cpu" and dtype == torch.bfloat16  # the interpreter's cast to bf16
    torch.testing.assert_close(total, expected_total, rtol=2**-7 if truncates else 0, atol=0)
    torch.testing.assert_close(x, before, rtol=0, atol=0)
    assert total is (residual if with_residual else x)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_given_output_is_filled(norm, device, kind):
    x, residual, weight, bias = rows(4, 100, torch.bfloat16, device)
    expected, _ = apply(reference, kind, x, residual, weight, bias)
    out = torch.full_like(x, NAN)
    normed, _ = apply(norm, kind, x, residual, weight, bias, out=out)
    assert normed is out
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def test_variance_is_exact_with_a_large_mean(norm, device):
    x = torch.randn(2, 512, device=device) + 1000
    weight, bias = torch.ones(512, device=device), torch.zeros(512, device=device)
    normed, _ = norm.add_layer_norm(x, None, weight, bias, EPS)
    expected = F.layer_norm(x.double(), (512,)).float()
    torch.testing.assert_close(normed, expected, rtol=1e-3, atol=1e-3)


def test_unsupported_inputs_are_errors(norm):
    weight = torch.ones(8)
    with pytest.raises(ValueError, match="contiguous"):
        norm.add_rms_norm(torch.ones(2, 16)[:, :8], None, weight, EPS)
    with pytest.raises(ValueError, match="longer than"):
        norm.add_rms_norm(torch.ones(1, norm.MAX_SIZE + 1), None, weight, EPS)
