"""Norms and residual sums: the reference against PyTorch in fp64, Triton against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.joins import EPS, JOINS, Join, make_join
from toolkit.kernels import reference
from toolkit.kernels.reference import Norm

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
# Relative: one or two units in the last place.
ROUNDED = [JOINS[index] for index in (0, 1, 2, 7, 11)]
TOLERANCE = {FP32: 1e-5, FP16: 1e-3, BF16: 2e-2}


@pytest.fixture(scope="session")
def norm(triton):
    from toolkit.kernels.triton import norm

    return norm


def exact_norm(x: Tensor, norm: Norm) -> Tensor:
    x = x.double()
    if norm.is_centered:
        x = x - x.mean(-1, keepdim=True)
    y = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.weight.double()
    return y if norm.bias is None else y + norm.bias.double()


@pytest.mark.parametrize("join", JOINS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_reference_equals_pytorch(join, dtype):
    (x, residual, norms), options = make_join(join, 5, 48, dtype, torch.device("cpu"), 1)
    before = None if residual is None else residual.clone()
    found, total = reference.join(x, residual, norms, **options)
    expected = x.double()
    if before is None:
        assert total is x
    else:
        assert total is residual
        expected = expected if not join.other else expected + options["other"].double()
        expected = exact_norm(expected, options["post"]) if join.post else expected
        expected = before.double() + join.scale * expected
        expected *= -0.75 if join.factor else 1
        torch.testing.assert_close(total.double(), expected, rtol=TOLERANCE[dtype], atol=1e-5)
    for normed, one in zip(found, norms, strict=True):
        assert normed.dtype == dtype
        torch.testing.assert_close(
            normed.double(), exact_norm(total, one), rtol=TOLERANCE[dtype], atol=1e-5
        )


@pytest.mark.on_cpu(
    "1-1-torch.float16-rms and residual and 1",
    "3-7-torch.float32-rms and residual and 1",
    "3-7-torch.float32-layer and residual and 0.3",
    "3-7-torch.float32-rms and rms and residual and other and post biased and -2",
    "1-768-torch.bfloat16-biased and residual and 1",
    "1-768-torch.bfloat16-layer wide and rms and residual and other and 1",
    "1-768-torch.bfloat16-residual and 1",
    "1-768-torch.bfloat16-rms and residual and post rms and factor and 1",
    "2-1000-torch.float16-rms wide and 1",
    "2-1000-torch.float16-biased and biased wide and residual and 1",
    "2-1000-torch.float16-residual and post layer and 0.5",
    "2-16384-torch.float32-biased and 1",
    "2-16384-torch.float32-rms wide and residual and post rms wide and 1",
)
@pytest.mark.parametrize("join", JOINS, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "size", "dtype"),
    [
        (1, 1, FP16),
        (3, 7, FP32),
        (1, 768, BF16),
        (2, 1000, FP16),
        (2, 16384, FP32),
    ],
    ids=str,
)
def test_triton_equals_reference(norm, device, num_tokens, size, dtype, join):
    (x, residual, norms), options = make_join(join, num_tokens, size, dtype, device, 1)
    own, before = None if residual is None else residual.clone(), x.clone()
    expected, expected_total = reference.join(x, residual, norms, **options)
    found, total = norm.join(x, own, norms, **options)
    assert len(found) == len(expected)
    for normed, one in zip(found, expected, strict=True):
        torch.testing.assert_close(normed, one, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    # A plain sum is exact, but the interpreter's cast to bf16 truncates.
    truncates = device.type == "cpu" and dtype == BF16
    is_exact = join == Join(join.residual, join.norms) and not truncates
    tolerance = 0 if is_exact else TOLERANCE[dtype]
    torch.testing.assert_close(total, expected_total, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(x, before, rtol=0, atol=0)
    assert total is (own if join.residual else x)


@pytest.mark.on_cpu(*(f"2-1000-torch.float16-{join}" for join in ROUNDED), f"5-7-{FP32}-{JOINS[0]}")
@pytest.mark.parametrize("join", ROUNDED, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "size", "dtype"), [(2, 1000, FP16), (5, 7, FP32), (70, 5120, BF16)], ids=str
)
def test_rounded_norms_equal_quantized_norms(norm, device, num_tokens, size, dtype, join):
    """Bit for bit, as if nothing was fused."""
    from toolkit.kernels.triton.products import fp8

    (x, residual, norms), options = make_join(join, num_tokens, size, dtype, device, 1)
    x[0], x[1, 3] = 0, float("nan")
    if residual is not None:
        residual[0] = 0
    for apply, quantize in ((norm.join, fp8.quantize), (reference.join, reference.quantize_fp8)):
        own, other = (None if residual is None else residual.clone() for _ in range(2))
        (normed,), expected_total = apply(x, own, norms, **options)
        expected, expected_scales = quantize(normed)
        scales = torch.full((num_tokens, 1), torch.inf, device=device)
        (values,), total = apply(x, other, norms, row_scales=scales, **options)
        assert torch.equal(values.view(torch.int8), expected.view(torch.int8))
        exact = {"rtol": 0, "atol": 0, "equal_nan": True}
        torch.testing.assert_close(scales, expected_scales, **exact)
        torch.testing.assert_close(total, expected_total, **exact)


def test_variance_is_exact_with_a_large_mean(norm, device):
    x = torch.randn(2, 512, device=device) + 1000
    layer = Norm(torch.ones(512, device=device), None, EPS, True)
    (normed,), _ = norm.join(x, None, [layer])
    expected = torch.nn.functional.layer_norm(x.double(), (512,)).float()
    torch.testing.assert_close(normed, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("size", "dtype", "is_wide"), [(1, FP32, True), (100, BF16, True), (1024, FP16, False)], ids=str
)
def test_rows_are_normed_in_place(norm, device, size, dtype, is_wide):
    torch.manual_seed(size)
    rows = (3 * torch.randn(5, 3 * size, device=device) + 1).to(dtype)
    weight = torch.randn(size, device=device).to(torch.float32 if is_wide else dtype)
    parts = [rows.clone() for _ in range(3)]
    for part, apply in zip(parts[:2], (norm.rms_norm_rows, reference.rms_norm_rows), strict=True):
        apply(part[:, size : 2 * size], weight, EPS)
    exact = exact_norm(rows[:, size : 2 * size], Norm(weight, None, EPS, False))
    parts[2][:, size : 2 * size] = exact.to(dtype)
    for part in parts[:2]:
        torch.testing.assert_close(part, parts[2], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_unsupported_inputs_are_errors(norm):
    rms = Norm(torch.ones(8), None, EPS, False)
    with pytest.raises(ValueError, match="contiguous"):
        norm.join(torch.ones(2, 16)[:, :8], None, [rms])
    with pytest.raises(ValueError, match="longer than"):
        norm.join(torch.ones(1, norm.MAX_SIZE + 1), None, [rms])
    with pytest.raises(ValueError, match="need a residual"):
        norm.join(torch.ones(1, 8), None, [rms], scale=2.0)
    with pytest.raises(ValueError, match="of one norm, not 2"):
        norm.join(torch.ones(1, 8), None, [rms, rms], row_scales=torch.ones(1, 1))
    with pytest.raises(ValueError, match="each row must be contiguous"):
        norm.rms_norm_rows(torch.ones(8, 8).T, rms.weight, EPS)
    with pytest.raises(ValueError, match="longer than"):
        norm.rms_norm_rows(torch.ones(1, norm.MAX_SIZE + 1), rms.weight, EPS)
