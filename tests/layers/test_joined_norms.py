"""RMS norms fused into the products before and after them."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from toolkit.layers import linear as layers
from toolkit.layers.linear import GatedLinear, Linear
from toolkit.layers.norm import RMSNorm

HIDDEN, INNER, WIDTH = 32, 48, 24


@dataclass
class Unscaled:
    """Stand-in for the kernels' own, on a CPU."""

    x: torch.Tensor
    square_sums: torch.Tensor
    eps: float

    def __len__(self):
        return len(self.x)

    @property
    def device(self):
        return self.x.device


def linear(x, weight, bias=None, activation=None, gated=False):
    scale = 1.0
    if isinstance(x, Unscaled):
        scale = torch.rsqrt(x.square_sums[:, None] / HIDDEN + x.eps).float()
        x = x.x
    y = F.linear(x.float(), weight.float()) * scale + (0 if bias is None else bias)
    return (gated_activation(y, activation) if gated else y).to(x.dtype)


def add_norm(x, weight, residual, norm_weight, eps, square_sums, bias=None):
    residual += linear(x, weight, bias)
    square_sums += residual.double().square().sum(1)
    return Unscaled(residual * norm_weight, square_sums, eps)


def gated_activation(y, kind):
    gate, up = y.chunk(2, dim=1)
    return F.silu(gate) * up


@pytest.fixture
def kernels(monkeypatch):
    kernels = SimpleNamespace(
        linear=linear,
        large_linear=F.linear,
        linear_add_norm=add_norm,
        gated_activation=gated_activation,
        fits_linear=lambda tokens, weight: tokens <= 64,
    )
    monkeypatch.setattr(layers, "kernels_for", lambda device: kernels)
    return kernels


def make(dtype=torch.bfloat16):
    torch.manual_seed(0)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        out = Linear(WIDTH, HIDDEN, bias=True)
        up = GatedLinear(HIDDEN, INNER, bias=False, activation="silu")
        norm = RMSNorm(HIDDEN, 1e-5)
    finally:
        torch.set_default_dtype(previous)
    for parameter in (*out.parameters(), *up.parameters(), *norm.parameters()):
        parameter.data.normal_()
    return out, norm, up


def both(tokens, dtype=torch.bfloat16, square_sums=True, **changes):
    """Return ((output, residual) of `after`, the same step by step, whether the norm was fused)."""
    out, norm, up = make(dtype)
    out.group = SimpleNamespace(size=1, rank=0, peer_memory=None, **changes.pop("group", {}))
    x, residual = torch.randn(tokens, WIDTH).to(dtype), torch.randn(tokens, HIDDEN).to(dtype)
    expected, total = norm(linear(x, out.weight, out.bias), residual.clone())
    sums = torch.zeros(tokens + tokens % 2, dtype=torch.float64) if square_sums else None
    normed, found = norm.after(out, x, residual, up, sums)
    return (
        (up(normed), found),
        (linear(expected, up.weight, gated=True), total),
        isinstance(normed, Unscaled),
    )


@pytest.mark.parametrize("tokens", [2, 7, 64])
def test_fused_norms_equal_separate_norms(kernels, tokens):
    (y, found), (expected, total), is_fused = both(tokens)
    assert is_fused
    torch.testing.assert_close(found, total, rtol=2e-2, atol=2e-2)
    assert (y.float() - expected.float()).norm() < 2e-2 * expected.float().norm()


@pytest.mark.parametrize(
    ("tokens", "options"),
    [
        (0, {}),
        (1, {}),
        (65, {}),
        (8, {"dtype": torch.float16}),
        (8, {"dtype": torch.float32}),
        (8, {"square_sums": False}),
    ],
)
def test_unsuited_rows_are_not_fused(kernels, tokens, options):
    (y, found), (expected, total), is_fused = both(tokens, **options)
    assert not is_fused
    torch.testing.assert_close(found, total, rtol=2e-2, atol=2e-2)
    assert (y.float() - expected.float()).norm() <= 2e-2 * expected.float().norm()


def test_both_products_must_be_suited(kernels):
    out, norm, up = make()
    x, residual = torch.randn(8, WIDTH).bfloat16(), torch.randn(8, HIDDEN).bfloat16()
    sums = torch.zeros(8, dtype=torch.float64)
    for odd in (out, up):
        kernels.fits_linear = lambda tokens, weight, odd=odd: weight is not odd.weight
        assert isinstance(norm.after(out, x, residual.clone(), up, sums)[0], torch.Tensor)
    kernels.fits_linear = lambda tokens, weight: True
    assert isinstance(norm.after(out, x, residual.clone(), up, sums)[0], Unscaled)


def test_products_summed_over_ranks_fuse_no_norms(kernels):
    out, _, _ = make()
    out.group = SimpleNamespace(size=2, rank=0)
    assert not out.can_fuse_norms(torch.zeros(8, WIDTH, dtype=torch.bfloat16))
