"""Products with weights: every size is computed right, by the kernel meant for it."""

from __future__ import annotations

import pytest
import torch

from tests.combinations import pairwise
from toolkit.kernels import reference

KINDS = [(None, False), ("gelu_tanh", False), ("silu", False), ("silu", True), ("gelu_tanh", True)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(scope="session")
def products(triton):
    from toolkit.kernels import products

    return products


@pytest.mark.on_cpu(
    "0-80-dtype1-kind1-False-False",
    "1-33-dtype2-kind2-True-False",
    "17-80-dtype4-kind4-True-True",
    "65-33-dtype7-kind7-True-True",
    "16-128-dtype23-kind23-True-True",
    "64-128-dtype30-kind30-True-True",
)
@pytest.mark.parametrize(
    ("tokens", "columns", "dtype", "kind", "biased", "has_out"),
    pairwise([0, 1, 16, 17, 64, 65], [128, 80, 33], DTYPES, KINDS, [True, False], [True, False]),
)
def test_product_equals_the_reference(
    products, device, tokens, columns, dtype, kind, biased, has_out
):
    torch.manual_seed(0)
    activation, gated = kind
    size = 24
    rows = 2 * size if gated else size
    weight = (torch.randn(rows, columns, device=device) / columns**0.5).to(dtype)
    x = torch.randn(tokens, columns, device=device).to(dtype)
    bias = torch.randn(rows, device=device).to(dtype) if biased else None
    out = torch.full((tokens, size), torch.nan, dtype=dtype, device=device) if has_out else None
    y = products.product(x, weight, bias, activation, gated=gated, out=out)
    assert out is None or y is out
    expected = reference.linear(x, weight, bias, activation, gated)
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.on_cpu(
    "1-(64, 256)-torch.bfloat16-(True, False)",
    "2-(64, 256)-torch.float16-(True, False)",
    "2-(64, 256)-torch.float32-(False, False)",
    "2-(64, 256)-torch.float8_e4m3fn-(False, False)",
    "16-(64, 80)-torch.bfloat16-(True, True)",
    "16-(64, 100)-torch.bfloat16-(False, False)",
    "64-(32768, 256)-torch.bfloat16-(True, True)",
    "17-(32769, 256)-torch.bfloat16-(False, False)",
    "65-(64, 256)-torch.bfloat16-(False, False)",
)
@pytest.mark.parametrize(
    ("tokens", "shape", "dtype", "expected"),
    [
        (1, (64, 256), torch.bfloat16, (True, False)),
        (2, (64, 256), torch.bfloat16, (True, True)),
        (2, (64, 256), torch.float16, (True, False)),
        (2, (64, 256), torch.float32, (False, False)),
        (2, (64, 256), torch.float8_e4m3fn, (False, False)),
        (16, (64, 80), torch.bfloat16, (True, True)),
        (17, (64, 80), torch.bfloat16, (False, False)),
        (16, (64, 100), torch.bfloat16, (False, False)),
        (64, (32768, 256), torch.bfloat16, (True, True)),
        (17, (32769, 256), torch.bfloat16, (False, False)),
        (65, (64, 256), torch.bfloat16, (False, False)),
    ],
    ids=str,
)
def test_size_decides_the_kernel(products, monkeypatch, tokens, shape, dtype, expected):
    """`expected`: is it a Triton kernel, and are norms fused into it?"""
    weight = torch.empty(shape, dtype=dtype, device="meta")
    x = torch.empty(tokens, shape[1], dtype=dtype, device="meta")
    monkeypatch.setattr(products.linear, "linear", lambda *_: "triton")
    monkeypatch.setattr(products.cublas, "linear", lambda *_: "cublas")
    is_triton = products.product(x, weight) == "triton"
    assert (is_triton, products.fuses_norm(tokens, weight)) == expected


@pytest.mark.on_cpu(
    "16-shape0-exact", "64-shape2-blocks", "65-shape3-tokens", "17-shape4-exact", "65-shape5-exact"
)
@pytest.mark.parametrize(
    ("tokens", "shape", "kind"),
    [
        (16, (64, 64), "exact"),
        (17, (64, 64), "blocks"),
        (64, (64, 64), "blocks"),
        (65, (64, 64), "tokens"),
        (17, (64, 40), "exact"),
        (65, (24, 64), "exact"),
    ],
)
def test_size_decides_the_precision_of_rows(products, monkeypatch, tokens, shape, kind):
    monkeypatch.setattr(products.fp8, "linear", lambda *_, **more: "exact")
    monkeypatch.setattr(products.fp8, "quantize", lambda x: (x, x))
    monkeypatch.setattr(products.fp8_matmul, "quantize", lambda x: (x, x))
    monkeypatch.setattr(products.fp8_matmul, "linear", lambda *_, **more: "blocks")
    monkeypatch.setattr(products, "scaled_product", lambda *_: "tokens")
    weight, x = torch.empty(shape, device="meta"), torch.empty(tokens, shape[1], device="meta")
    assert products.fp8_product(x, weight, weight[:, 0]) == kind
    assert products.reads_rounded(tokens, weight) == (kind == "tokens")


@pytest.mark.parametrize(
    ("tokens", "size", "kind", "gated", "is_rounded"),
    [
        (65, 48, "silu", True, True),
        (65, 64, "relu2", False, True),
        (64, 48, "silu", True, False),
        (65, 40, None, False, False),
        (65, 80, "silu", True, False),  # longer than fp8.MAX_SIZE
    ],
)
def test_results_for_another_product_are_rounded(
    products, device, monkeypatch, tokens, size, kind, gated, is_rounded
):
    monkeypatch.setattr(products.fp8, "MAX_SIZE", 64)
    torch.manual_seed(0)
    weight, scale = reference.quantize_fp8(torch.randn(size * (1 + gated), 64, device=device))
    x = torch.randn(tokens, 64, device=device).bfloat16()
    bias = torch.randn(len(weight), device=device).bfloat16()
    call = (x, weight, scale[:, 0].contiguous(), bias, kind)
    expected = products.fp8_product(*call, gated=gated)
    found = products.rounded_fp8_product(*call, gated=gated)
    assert isinstance(found, reference.Rounded) == is_rounded
    if not is_rounded:
        assert torch.equal(found, expected)
        return
    values, scales = products.fp8.quantize(expected)
    assert (found.dtype, len(found)) == (torch.bfloat16, tokens)
    assert torch.equal(found.values.float(), values.float())
    assert torch.equal(found.scales, scales)
    weight, scale = reference.quantize_fp8(torch.randn(32, size, device=device))
    down = weight, scale[:, 0].contiguous()
    y = products.fp8_product(expected, *down)
    assert torch.equal(products.fp8_product(found, *down), y)
    wanted = torch.tensor([3, 0, 60], device=device)
    few = products.fp8_product(found[wanted], *down)
    torch.testing.assert_close(few, y[wanted], rtol=1e-2, atol=1e-2)
