"""Products with FP8 weights that have a scale for each block, against fp64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.combinations import pairwise
from tests.kernels.products.test_epilogue import add_delta, make_delta
from tests.kernels.products.test_lora import expected_delta, make_factors
from toolkit.kernels import reference

NAN = float("nan")
FP8 = torch.float8_e4m3fn
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}  # relative, in norm
ROUNDED = 0.04
"""Tolerance if x is rounded too: half a step of e4m3 is 2 to 4 % of most numbers."""
ENDS = [(None, False, True), ("gelu", False, False), ("silu", True, False), ("silu", True, True)]
gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.fixture(scope="session")
def kernels(triton) -> SimpleNamespace:
    from toolkit.kernels import products
    from toolkit.kernels.triton.products import epilogue, fp8, fp8_matmul, lora, matmul

    return SimpleNamespace(
        products=products,
        epilogue=epilogue,
        fp8=fp8,
        fp8_matmul=fp8_matmul,
        lora=lora,
        matmul=matmul,
    )


class Call(NamedTuple):
    """Arguments of a product, and the weight in fp64."""

    x: Tensor
    weight: Tensor
    scale: Tensor
    bias: Tensor | None
    activation: str | None
    gated: bool
    dense: Tensor

    def expected(self, x: Tensor | None = None, delta=None) -> Tensor:
        """Return the product in fp64. x: after rounding."""
        bias = None if self.bias is None else self.bias.double()
        y = F.linear((self.x if x is None else x).double(), self.dense, bias)
        if delta is not None:
            add_delta(y, delta)
        if self.gated:
            y, up = y.chunk(2, 1)
        if self.activation is not None:
            y = {"gelu": F.gelu, "silu": F.silu}[self.activation](y)
        return y * up if self.gated else y


def make(
    device: torch.device,
    tokens: int,
    size: int,
    columns: int,
    end: tuple[str | None, bool, bool] = ENDS[0],
    dtype: torch.dtype = torch.bfloat16,
) -> Call:
    """Return a random call. Scales of blocks, and groups of x, differ by factors of up to 64."""
    torch.manual_seed(0)
    activation, gated, biased = end
    rows = 2 * size if gated else size
    weight = torch.randn(rows, columns, device=device).clamp(-440, 440).to(FP8)
    scale = torch.exp2(6 * torch.rand(-(-rows // 128), -(-columns // 128), device=device) - 5)
    scale /= columns**0.5
    row, column = (torch.arange(n, device=device) // 128 for n in (rows, columns))
    x = torch.randn(tokens, columns, device=device)
    x *= torch.exp2(6 * torch.rand(tokens, int(column[-1]) + 1, device=device) - 3)[:, column]
    return Call(
        x.to(dtype),
        weight,
        scale,
        torch.randn(rows, device=device).to(dtype) if biased else None,
        activation,
        gated,
        weight.double() * scale.double()[row][:, column],
    )


def check(y: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    assert y.shape == expected.shape
    error = (y.double() - expected).norm() / expected.norm()
    assert error < (tolerance or TOLERANCE[y.dtype])  # NaN fails too


def empty_result(call: Call) -> Tensor:
    size = len(call.weight) // 2 if call.gated else len(call.weight)
    return torch.full((len(call.x), size), NAN, dtype=call.x.dtype, device=call.x.device)


# The reference


def test_reference_scales_each_block():
    call = make(torch.device("cpu"), 3, 300, 200, ("silu", True, True), torch.float32)
    check(reference.linear_scaled(*call[:6]), call.expected())


def test_reference_scales_each_group_of_128():
    x = torch.randn(3, 300) * torch.tensor([1.0, 1e-3, 1e3])[:, None]
    x[:, 128:256] *= 100
    rows, scales = reference.quantize_fp8(x, 128)
    assert (rows.shape, scales.shape) == ((3, 300), (3, 3))
    for group, part in enumerate(x.split(128, dim=1)):
        ours, scale = reference.quantize_fp8(part)
        assert torch.equal(rows[:, group * 128 :][:, : part.shape[1]].float(), ours.float())
        assert torch.equal(scales[:, group], scale[:, 0])
    assert ((reference.round_to_fp8(x) - x).norm(dim=1) < ROUNDED * x.norm(dim=1)).all()


# Rounding rows in groups


@pytest.mark.on_cpu(
    "torch.float32-1",
    "torch.float32-300",
    "torch.float32-768",
    "torch.float32-4096",
    "torch.float16-100",
    "torch.bfloat16-128",
)
@pytest.mark.parametrize("size", [1, 100, 128, 300, 768, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_quantize_in_groups_equals_reference(kernels, device, dtype, size):
    torch.manual_seed(0)
    spread = torch.exp2(8 * torch.rand(9, size, device=device) - 6)
    x = (torch.randn(9, size, device=device) * spread).to(dtype)
    x[4, :128] = 0
    rows, scales = kernels.fp8_matmul.quantize(x)
    expected_rows, expected_scales = reference.quantize_fp8(x, 128)
    assert (rows.dtype, scales.shape) == (FP8, (9, -(-size // 128)))
    assert scales.T.is_contiguous()
    torch.testing.assert_close(scales, expected_scales, rtol=0, atol=0)
    torch.testing.assert_close(rows.float(), expected_rows.float(), rtol=0, atol=0)


@pytest.mark.parametrize("size", [128, 300, 2048])
def test_two_parts_are_bf16_exactly(kernels, device, size):
    """Two parts lose digits only of numbers far below the greatest of their block."""
    torch.manual_seed(0)
    x = torch.randn(9, size, device=device)
    x *= torch.exp2(12 * torch.rand(9, size, device=device))
    block = torch.arange(size, device=device) // 128
    x *= torch.exp2(40 * torch.rand(9, int(block[-1]) + 1, device=device) - 20)[:, block]
    x[1], x[2, 0] = 0.0, 3e38
    x = x.bfloat16().double()
    (first, second), scales = kernels.fp8_matmul.split(x.bfloat16())
    found = (first.double() + second.double() / 16) * scales.double()[:, block]
    greatest = torch.stack([part.abs().amax(1) for part in x.split(128, 1)], 1)[:, block]
    is_large = x.abs() >= greatest / 64
    assert torch.equal(found[is_large], x[is_large])
    assert bool(((found - x).abs() <= greatest / 2**21).all())


@gpu
@needs_gpu
def test_two_parts_keep_nan_and_infinity(kernels, device):
    x = torch.ones(2, 256, dtype=torch.bfloat16, device=device)
    x[0, 5], x[1, 200] = NAN, float("inf")
    (first, second), scales = kernels.fp8_matmul.split(x)
    y = (first.float() + second.float() / 16) * scales.repeat_interleave(128, 1)
    assert torch.equal(y.isnan(), x.isnan())
    assert not bool(y[1, 200].isfinite())


# x in 16 bits


@pytest.mark.on_cpu(
    "1-128-64-(None, False, True)-torch.bfloat16",
    "8-128-1100-('gelu', False, False)-torch.bfloat16",
    "1-384-1040-('silu', True, False)-torch.float16",
    "16-128-384-('silu', True, True)-torch.bfloat16",
    "1-128-2064-('gelu', False, False)-torch.bfloat16",
    "2-128-128-('silu', True, True)-torch.bfloat16",
)
@pytest.mark.parametrize(
    ("tokens", "size", "columns", "end", "dtype"),
    pairwise(
        [1, 2, 8, 16, 70],
        [128, 256, 384],
        [64, 128, 384, 1040, 1100, 2064, 4096],
        ENDS,
        [torch.bfloat16, torch.float16],
    ),
    ids=str,
)
def test_product_equals_that_with_the_dense_weight(
    kernels, device, tokens, size, columns, end, dtype
):
    call = make(device, tokens, size, columns, end, dtype)
    out = empty_result(call)
    assert kernels.fp8.linear(*call[:6], out=out) is out
    check(out, call.expected())


@pytest.mark.on_cpu("1-1", "1-200", "5-100")
@pytest.mark.parametrize("rows", [1, 100, 200])
@pytest.mark.parametrize("tokens", [1, 5])
def test_last_block_of_rows_may_be_smaller(kernels, device, rows, tokens):
    call = make(device, tokens, rows, 256)
    check(kernels.fp8.linear(*call[:6]), call.expected())


@pytest.mark.on_cpu("768-2-True", "6000-12-False", "40000-20-True")
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens", [2, 12, 20])
@pytest.mark.parametrize("num_rows", [768, 6000, 40_000])
def test_best_tiles_cover_every_size(kernels, device, num_rows, tokens, gated):
    """The product has few outputs, to keep the interpreter fast."""
    for columns in (512, 1040):
        tile = kernels.matmul.best_tile_of_fp8(tokens, num_rows, columns)
        call = make(device, tokens, 128, columns, (None, gated, True))
        out = empty_result(call)
        kernels.matmul.matmul(*call[:6], out=out, tile=tile)
        check(out, call.expected())


@pytest.mark.on_cpu("1-True", "2-False")
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 12, 40])
def test_adapters_are_added_to_products_of_few_rows(kernels, device, tokens, gated):
    call = make(device, tokens, 128, 1040, ("silu", gated, True))
    delta = make_delta(kernels, call.x, len(call.weight), (2, -1, 0), parts=2)
    y = kernels.fp8.linear(*call[:6], delta=delta)
    check(y, call.expected(delta=delta))


def test_programs_divide_the_columns(kernels, device):
    call = make(device, 8, 128, 900)
    out = empty_result(call)
    kernels.matmul.matmul(*call[:6], out=out, tile=kernels.matmul.Tile(64, 3, 1, 3))
    check(out, call.expected())


# x in FP8


def run(kernels, call: Call, tile=None, delta=None) -> tuple[Tensor, Tensor]:
    """Return (the product of x that is rounded, x after rounding in fp64)."""
    rows, scales = reference.quantize_fp8(call.x, 128)
    column = torch.arange(call.x.shape[1], device=rows.device) // 128
    scales = scales.T.contiguous().T
    y = kernels.fp8_matmul.linear(
        rows, scales, *call[1:6], empty_result(call), tile=tile, delta=delta
    )
    return y, rows.double() * scales.double()[:, column]


TILES = [
    None,
    (32, 64, 3, 4, 1),
    (32, 64, 3, 4, 3),
    (64, 64, 3, 4, 2),
    (16, 64, 3, 4, 1),
    (128, 128, 3, 8, 1),
    (64, 128, 3, 4, 1),
]


@pytest.mark.on_cpu(
    "None-17-128-128-(None, False, True)-torch.bfloat16",
    "(32, 64, 3, 4, 1)-64-128-1040-('silu', True, False)-torch.float16",
    "(16, 64, 3, 4, 1)-150-128-384-('gelu', False, False)-torch.float16",
    "(128, 128, 3, 8, 1)-17-128-384-('silu', True, True)-torch.float16",
    "(64, 128, 3, 4, 1)-33-256-1040-('silu', True, True)-torch.float16",
    "None-300-128-2048-(None, False, True)-torch.bfloat16",
    "(64, 64, 3, 4, 2)-17-128-128-('gelu', False, False)-torch.bfloat16",
    "(32, 64, 3, 4, 3)-150-128-128-(None, False, True)-torch.bfloat16",
)
@pytest.mark.parametrize(
    ("tile", "tokens", "size", "columns", "end", "dtype"),
    pairwise(
        TILES,
        [17, 33, 64, 150, 300],
        [128, 256],
        [128, 384, 1040, 2048],
        ENDS,
        [torch.bfloat16, torch.float16],
    ),
    ids=str,
)
def test_product_of_rounded_rows_is_exact(kernels, device, tile, tokens, size, columns, end, dtype):
    """Apart from the type of the result. Tiles of 16 tokens are more than run side by side."""
    call = make(device, tokens, size, columns, end, dtype)
    if tile is not None:
        tile = kernels.fp8_matmul.Tile(*tile)
        if tokens > tile.tokens:
            tile = tile._replace(splits=1)
    y, x = run(kernels, call, tile)
    check(y, call.expected(x))


@pytest.mark.on_cpu("False-17", "True-40", "True-64")
@pytest.mark.parametrize("tokens", [17, 40, 64])
@pytest.mark.parametrize("gated", [False, True])
def test_products_with_scales_of_rows(kernels, device, tokens, gated):
    call = make(device, tokens, 192, 400, ("silu", gated, True))
    scale = torch.rand(len(call.weight), device=device) / 20
    dense = call.weight.double() * scale.double()[:, None]
    delta = make_delta(kernels, call.x, len(call.weight), (2, -1, 0), parts=2)
    call = call._replace(scale=scale, dense=dense)
    y, x = run(kernels, call, delta=delta)
    check(y, call.expected(x, delta=delta))
    y = kernels.products.fp8_product(*call[:5], gated=gated)
    check(y, call.expected(x))


@pytest.mark.on_cpu("20-1", "20-200", "200-100")
@pytest.mark.parametrize("rows", [1, 100, 200])
@pytest.mark.parametrize("tokens", [20, 200])
def test_last_tile_of_rows_may_be_smaller(kernels, device, rows, tokens):
    call = make(device, tokens, rows, 256)
    y, x = run(kernels, call)
    check(y, call.expected(x))


@pytest.mark.on_cpu("None-20-True", "None-150-True", "(128, 128, 3, 8, 1)-64-False")
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens", [20, 64, 150])
@pytest.mark.parametrize("tile", [None, (128, 128, 3, 8, 1)], ids=str)
def test_adapters_are_added_before_the_end(kernels, device, tile, tokens, gated):
    call = make(device, tokens, 128, 256, ("silu", gated, True))
    tile = None if tile is None else kernels.fp8_matmul.Tile(*tile)
    delta = make_delta(kernels, call.x, len(call.weight), (0, -1, 2), parts=2)
    y, x = run(kernels, call, tile, delta)
    check(y, call.expected(x, delta))


# The choice


@pytest.mark.parametrize(
    ("tokens", "size", "columns", "is_rounded"),
    [(1, 128, 256, False), (16, 128, 256, False), (17, 128, 256, True), (70, 128, 200, False)],
)
def test_products_are_close_to_those_of_exact_rows(
    kernels, device, tokens, size, columns, is_rounded
):
    call = make(device, tokens, size, columns)
    out = empty_result(call)
    assert kernels.products.fp8_block_product(*call[:6], out=out) is out
    error = (out.double() - call.expected()).norm() / call.expected().norm()
    assert (error > 0.01) == is_rounded
    assert error < ROUNDED


@pytest.mark.on_cpu("1-False", "5-True")
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens", [1, 5, 40, 150])
def test_products_add_adapters(kernels, device, tokens, gated):
    """On a GPU, in every one of several calls: kernels start before those ahead end."""
    call = make(device, tokens, 128, 512, ("silu", gated, True))
    rows, columns = call.weight.shape
    slots = [(0, -1, 2)[token % 3] for token in range(tokens)]
    factors = make_factors(kernels, slots, columns, rows, call.x.dtype, device, parts=2, blocks=2)
    x = call.x.double() if tokens <= 16 else reference.round_to_fp8(call.x).double()
    y = F.linear(x, call.dense, call.bias.double()) + expected_delta(call.x, factors)
    if gated:
        y, up = y.chunk(2, 1)
    y = F.silu(y) * (up if gated else 1)
    product = kernels.products.fp8_block_product
    results = [
        product(*call[:6], factors=factors) for _ in range(8 if device.type == "cuda" else 1)
    ]
    check(results[0], y, 0.01)
    assert all(torch.equal(one, results[0]) for one in results)


@pytest.mark.parametrize(
    "shape", [(6144, 4096), (4096, 4096), (28672, 4096), (1024, 3072), (768, 768)], ids=str
)
def test_warm_up_has_a_step_for_each_kernel(kernels, shape):
    """More rows than MORE_ROW_CLASSES have one kernel, which the largest step compiles."""
    from toolkit.worker.step_sizes import MIXED, sizes_below

    def kernel(tokens: int) -> tuple[object, ...]:
        return kernels.fp8_matmul.best_tile(tokens, *shape), kernels.matmul.late(
            tokens, None, False, False
        )

    classes = (*kernels.matmul.ROW_CLASSES, *kernels.products.MORE_ROW_CLASSES)
    assert set(kernels.products.MORE_ROW_CLASSES) <= set(sizes_below(8193, MIXED))
    warm = {kernel(tokens) for tokens in classes if tokens > kernels.fp8.TOKENS}
    assert {kernel(tokens) for tokens in range(17, classes[-1] + 1)} == warm
    assert len({kernel(tokens) for tokens in range(classes[-1] + 1, 20_000, 7)}) == 1


def test_unsupported_inputs_are_errors(kernels, device):
    call = make(device, 20, 128, 256)
    x, scales = kernels.fp8_matmul.quantize(call.x)
    given = dict(zip(("weight", "scale", "bias", "activation", "gated"), call[1:6], strict=True))
    given |= {"x": x, "x_scale": scales, "out": empty_result(call)}
    linear = kernels.fp8_matmul.linear
    for changes, message in (
        ({"x": call.x}, "must be torch.float8"),
        ({"weight": call.weight.float()}, "must be torch.float8"),
        ({"weight": call.weight[:, :128]}, "same columns"),
        ({"x_scale": scales.contiguous()}, "needs 2 scales"),
        ({"x_scale": scales[:, :1]}, "needs 2 scales"),
        ({"scale": call.scale[:, 0].contiguous()}, r"must be \[128\] or \[1, 2\]"),
        ({"scale": call.scale[:, :1]}, r"must be \[128\] or \[1, 2\]"),
        ({"gated": True}, "64 rows are no multiple of 128"),
        ({"activation": "swish"}, "not one of"),
        ({"tile": kernels.fp8_matmul.Tile(16, 64, 2, splits=2)}, "splits"),
    ):
        with pytest.raises(ValueError, match=message):
            linear(**given | changes)
    with pytest.raises(ValueError, match="no multiple of 128"):
        kernels.fp8.linear(*call[:5], gated=True)
    with pytest.raises(ValueError, match=r"must be \[128\] or \[1, 2\]"):
        kernels.fp8.linear(call.x, call.weight, call.scale[:, :1])


# Real sizes, compiled


@gpu
@needs_gpu
@pytest.mark.parametrize("tokens", [1, 8, 16, 17, 64, 256, 515, 2048])
@pytest.mark.parametrize(
    ("size", "columns", "end"),
    [
        (6144, 4096, ENDS[0]),
        (4096, 14336, ENDS[0]),
        (14336, 4096, ENDS[2]),
        (7168, 2048, ENDS[0]),
        (1536, 7168, ENDS[0]),
    ],
    ids=str,
)
def test_products_of_real_sizes(kernels, device, size, columns, end, tokens):
    call = make(device, tokens, size, columns, end)
    if tokens <= kernels.fp8.TOKENS:
        check(kernels.products.fp8_block_product(*call[:6]), call.expected())
        return
    y, x = run(kernels, call)
    check(y, call.expected(x))
    check(kernels.products.fp8_block_product(*call[:6]), y.double())
