"""Norms that two products of few rows share out between them: when, and that nothing is forgotten on the way."""

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
    """As the kernels' own, on a CPU."""

    x: torch.Tensor
    squares: torch.Tensor
    eps: float

    def __len__(self):
        return len(self.x)

    @property
    def device(self):
        return self.x.device


def linear(x, weight, bias=None, activation=None, gated=False):
    scale = 1.0
    if isinstance(x, Unscaled):
        scale = torch.rsqrt(x.squares[:, None] / HIDDEN + x.eps).float()
        x = x.x
    y = F.linear(x.float(), weight.float()) * scale + (0 if bias is None else bias)
    return (gated_activation(y, activation) if gated else y).to(x.dtype)


def add_norm(x, weight, residual, norm_weight, eps, squares, bias=None):
    residual += linear(x, weight, bias)
    squares += residual.double().square().sum(1)
    return Unscaled(residual * norm_weight, squares, eps)


def gated_activation(y, kind):
    gate, up = y.chunk(2, dim=1)
    return F.silu(gate) * up


@pytest.fixture
def kernels(monkeypatch):
    kernels = SimpleNamespace(
        linear=linear,
        large_linear=F.linear,
        add_norm=add_norm,
        gated_activation=gated_activation,
        fits=lambda tokens, weight: tokens <= 64,
    )
    monkeypatch.setattr(layers, "fused", lambda device: kernels)
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


def both(tokens, dtype=torch.bfloat16, squares=True, **changes):
    """(what `up` makes and the residual, as `after` has it; the same step by step; whether the norm was joined)."""
    out, norm, up = make(dtype)
    out.group = SimpleNamespace(size=1, rank=0, symmetric=None, **changes.pop("group", {}))
    x, residual = torch.randn(tokens, WIDTH).to(dtype), torch.randn(tokens, HIDDEN).to(dtype)
    expected, total = norm(linear(x, out.weight, out.bias), residual.clone())
    room = torch.zeros(tokens + tokens % 2, dtype=torch.float64) if squares else None
    normed, found = norm.after(out, x, residual, up, room)
    return (
        (up(normed), found),
        (linear(expected, up.weight, gated=True), total),
        isinstance(normed, Unscaled),
    )


@pytest.mark.parametrize("tokens", [2, 7, 64])
def test_joined_norms_are_the_norms(kernels, tokens):
    (y, found), (expected, total), joined = both(tokens)
    assert joined
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
        (8, {"squares": False}),
    ],
)
def test_what_does_not_fit_is_done_one_after_the_other(kernels, tokens, options):
    (y, found), (expected, total), joined = both(tokens, **options)
    assert not joined
    torch.testing.assert_close(found, total, rtol=2e-2, atol=2e-2)
    assert (y.float() - expected.float()).norm() <= 2e-2 * expected.float().norm()


def test_both_products_have_to_fit(kernels):
    out, norm, up = make()
    x, residual = torch.randn(8, WIDTH).bfloat16(), torch.randn(8, HIDDEN).bfloat16()
    room = torch.zeros(8, dtype=torch.float64)
    for odd in (out, up):
        kernels.fits = lambda tokens, weight, odd=odd: weight is not odd.weight
        assert isinstance(norm.after(out, x, residual.clone(), up, room)[0], torch.Tensor) is True
    kernels.fits = lambda tokens, weight: True
    assert isinstance(norm.after(out, x, residual.clone(), up, room)[0], Unscaled)


def test_a_part_of_a_sum_over_ranks_is_not_normed(kernels):
    out, _, _ = make()
    out.group = SimpleNamespace(size=2, rank=0)
    assert not out.joins_norms(torch.zeros(8, WIDTH, dtype=torch.bfloat16))
