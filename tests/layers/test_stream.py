"""The residual stream: joins, and RMS norms fused into the products around them."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from toolkit.kernels import reference
from toolkit.layers.linear import GatedLinear, Linear
from toolkit.layers.norm import Join, Norm
from toolkit.layers.stream import Stream
from toolkit.weights.kinds import plain
from toolkit.weights.source import Source

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


def product(x, weight, bias=None, activation=None, *, gated=False, out=None, factors=None):
    scale = 1.0
    if isinstance(x, Unscaled):
        scale = torch.rsqrt(x.square_sums[:, None] / HIDDEN + x.eps).float()
        x = x.x
    y = F.linear(x.float(), weight.float()) * scale + (0 if bias is None else bias)
    if gated:
        gate, up = y.chunk(2, dim=1)
        y = F.silu(gate) * up
    return y.to(x.dtype)


def add_norm(x, weight, residual, norm_weight, eps, square_sums, bias=None, factors=None):
    residual += product(x, weight, bias)
    square_sums += residual.double().square().sum(1)
    return Unscaled(residual * norm_weight, square_sums, eps)


@pytest.fixture
def kernels(monkeypatch):
    kernels = SimpleNamespace(
        product=product, product_add_norm=add_norm, fuses_norm=lambda tokens, weight: tokens != 5
    )
    monkeypatch.setattr(plain, "triton_kernels_for", lambda device: kernels)
    return kernels


def make(size: int = 1):
    torch.manual_seed(0)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        out = Linear(WIDTH, HIDDEN, Source("out"), bias=True)
        sources = Source("gate"), Source("up")
        up = GatedLinear(HIDDEN, INNER, sources, bias=False, activation="silu")
        norm = Norm("norm", HIDDEN, 1e-5)
    finally:
        torch.set_default_dtype(previous)
    for parameter in (*out.parameters(), *up.parameters(), *norm.parameters()):
        parameter.data.normal_()
    out.group = SimpleNamespace(size=size, rank=0, peer_memory=None)
    return out, norm, up


def read(tokens, out, join, up, num_products=1):
    """Return ((rows of the read, residual), the same without fusing)."""
    xs = [torch.randn(tokens, WIDTH).bfloat16() for _ in range(num_products)]
    residual = torch.randn(tokens, HIDDEN).bfloat16()
    products = [product(x, out.weight.values, out.bias) for x in xs]
    (expected, *_), total = join(products[0], residual.clone(), *products[1:])
    stream = Stream(residual, 1)
    for x in xs:
        stream.add(out, x)
    (rows, *_) = stream.read(join, up)
    return (rows, stream.residual), (expected, total)


@pytest.mark.parametrize("tokens", [2, 7, 64])
def test_fused_norms_equal_separate_norms(kernels, tokens):
    out, norm, up = make()
    (rows, found), (expected, total) = read(tokens, out, Join(HIDDEN, [norm]), up)
    assert isinstance(rows, Unscaled)
    torch.testing.assert_close(found, total, rtol=2e-2, atol=2e-2)
    y, expected = up(rows).float(), product(expected, up.weight.values, gated=True).float()
    assert (y - expected).norm() < 2e-2 * expected.norm()


def centered():
    norm = Norm("norm", HIDDEN, 1e-5, is_centered=True)
    norm.to(torch.bfloat16)
    return norm


JOINS = {
    "rows": lambda norm: ([norm], None, 1.0),
    "layer norm": lambda norm: ([centered()], None, 1.0),
    "post": lambda norm: ([norm], centered(), 1.0),
    "scale": lambda norm: ([norm], None, 0.5),
    "two norms": lambda norm: ([norm, centered()], None, 1.0),
}


@pytest.mark.parametrize("kind", JOINS)
def test_other_joins_are_not_fused(kernels, kind):
    out, norm, up = make()
    join = Join(HIDDEN, *JOINS[kind](norm))
    (rows, found), (expected, total) = read(5 if kind == "rows" else 8, out, join, up)
    torch.testing.assert_close(found, total, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(rows, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", JOINS)
def test_the_only_norm_is_rounded_for_a_product_that_reads_it(kernels, kind):
    out, norm, up = make()
    kernels.fuses_norm = lambda tokens, weight: False
    up.weight.reads_rounded = lambda tokens: tokens > 7
    join = Join(HIDDEN, *JOINS[kind](norm))
    (rows, found), (expected, total) = read(8, out, join, up)
    assert torch.equal(found, total)
    if kind == "two norms":
        assert torch.equal(rows, expected)
        return
    values, scales = reference.quantize_fp8(expected)
    assert (rows.dtype, len(rows)) == (torch.bfloat16, 8)
    assert torch.equal(rows.values.float(), values.float())
    assert torch.equal(rows.scales, scales)
    for tokens, reader in ((7, up), (8, None)):
        (rows, _), (expected, _) = read(tokens, out, join, reader)
        assert torch.equal(rows, expected)


def test_the_first_norm_is_rounded(kernels):
    _, norm, up = make()
    up.weight.reads_rounded = lambda tokens: True
    (rows,) = Stream(torch.randn(8, HIDDEN).bfloat16(), 1).read(Join(HIDDEN, [norm]), up)
    assert isinstance(rows, reference.Rounded)


def test_two_products_are_added_in_one_join(kernels):
    out, norm, up = make()
    (rows, found), (expected, total) = read(8, out, Join(HIDDEN, [norm]), up, num_products=2)
    torch.testing.assert_close(found, total, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(rows, expected, rtol=2e-2, atol=2e-2)


def test_a_second_read_adds_nothing(kernels):
    out, norm, _ = make()
    stream = Stream(torch.randn(8, HIDDEN).bfloat16(), 2)
    stream.add(out, torch.randn(8, WIDTH).bfloat16())
    stream.read(Join(HIDDEN, [norm]))
    before = stream.residual.clone()
    (rows,) = stream.read(Join(HIDDEN, []))
    assert torch.equal(rows, before)


def test_both_products_must_be_suited(kernels):
    out, norm, up = make()
    for odd in (out, up):
        kernels.fuses_norm = lambda tokens, weight, odd=odd: weight is not odd.weight.values
        (rows, _), _ = read(8, out, Join(HIDDEN, [norm]), up)
        assert isinstance(rows, torch.Tensor)


def test_products_summed_over_ranks_fuse_no_norms(kernels):
    out, _, _ = make(size=2)
    assert not out.can_fuse_norms(torch.zeros(8, WIDTH, dtype=torch.bfloat16))
