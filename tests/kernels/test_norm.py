"""Fused sums and norms: the reference against PyTorch, Triton against the reference."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.kernels import reference

EPS = 1e-5
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {
    torch.float32: 1e-5,
    torch.float16: 1e-3,
    torch.bfloat16: 2e-2,
}  # an ulp or two, relative
NAN = float("nan")


@pytest.fixture(scope="session")
def norm(triton_runs: bool):
    if not triton_runs:
        pytest.skip(
            "Triton was imported without its interpreter: these tests run in a process of their own"
        )
    from toolkit.kernels.triton import norm

    return norm


def rows(
    num_tokens: int, size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """x, residual, weight, bias; far from zero mean and unit variance."""
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
def test_reference_agrees_with_pytorch(dtype):
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
def test_rows_of_any_size(norm, device, dtype, num_tokens, size, with_residual, kind):
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
def test_an_output_that_is_given_is_filled(norm, device, kind):
    x, residual, weight, bias = rows(4, 100, torch.bfloat16, device)
    expected, _ = apply(reference, kind, x, residual, weight, bias)
    out = torch.full_like(x, NAN)
    normed, _ = apply(norm, kind, x, residual, weight, bias, out=out)
    assert normed is out
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def test_a_large_mean_does_not_drown_the_variance(norm, device):
    x = torch.randn(2, 512, device=device) + 1000
    weight, bias = torch.ones(512, device=device), torch.zeros(512, device=device)
    normed, _ = norm.add_layer_norm(x, None, weight, bias, EPS)
    expected = F.layer_norm(x.double(), (512,)).float()
    torch.testing.assert_close(normed, expected, rtol=1e-3, atol=1e-3)


def test_what_the_kernel_cannot_do_is_an_error(norm):
    weight = torch.ones(8)
    with pytest.raises(ValueError, match="contiguous"):
        norm.add_rms_norm(torch.ones(2, 16)[:, :8], None, weight, EPS)
    with pytest.raises(ValueError, match="longer than"):
        norm.add_rms_norm(torch.ones(1, norm.MAX_SIZE + 1), None, weight, EPS)
