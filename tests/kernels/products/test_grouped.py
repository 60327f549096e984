"""Products with int4 and int8 weights in groups, against the weight that they stand for."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.combinations import pairwise
from toolkit.weights.groups import Groups, pack_nibbles

NAN = float("nan")
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 6e-3}  # relative, in norm


@pytest.fixture(scope="session")
def grouped_layout(triton):
    from toolkit.kernels.triton.products import grouped_layout

    return grouped_layout


@pytest.fixture(scope="session")
def grouped(triton):
    from toolkit.kernels.triton.products import grouped

    return grouped


@dataclass(frozen=True)
class Format:
    bits: int
    group: int
    is_shifted: bool = False
    scale_type: torch.dtype = torch.float16

    def __str__(self) -> str:
        shifted = " with offsets" if self.is_shifted else ""
        return f"int{self.bits} by {self.group}{shifted} {str(self.scale_type)[6:]}"


FORMATS = [
    Format(4, 128),
    Format(4, 128, is_shifted=True),
    Format(4, 64, scale_type=torch.bfloat16),
    Format(4, 32, is_shifted=True, scale_type=torch.float32),
    Format(4, 16, is_shifted=True),
    Format(4, 384),
    Format(8, 128),
    Format(8, 32, scale_type=torch.float32),
    Format(8, 16, is_shifted=True),
    Format(8, 384, scale_type=torch.float32),
]


def make(grouped_layout, format: Format, rows: int, columns: int, device: torch.device):
    """Return (the weight in the kernels' order, the weight in fp32)."""
    torch.manual_seed(0)
    groups = rows, -(-columns // format.group)
    scales = (torch.rand(groups, device=device) + 0.5) / (columns**0.5 * 2 ** (format.bits - 3))
    scales = scales.to(format.scale_type)
    integers = torch.randint(0, 2**format.bits, (rows, columns), device=device, dtype=torch.uint8)
    values = pack_nibbles(integers) if format.bits == 4 else integers
    offsets = torch.randn(groups, device=device) / 100 if format.is_shifted else None
    parts = values, scales, offsets
    dense = Groups(format.bits, *parts).dequantize()
    with torch.device(device):
        weight = grouped_layout.empty(
            (rows, columns),
            format.bits,
            format.group,
            format.scale_type,
            torch.float32 if format.is_shifted else None,
        )
    if weight is not None:  # filled in two parts
        for part in (slice(0, rows // 2), slice(rows // 2, rows)):
            own_parts = [None if one is None else one[part] for one in parts]
            grouped_layout.arrange(*own_parts, format.group, weight, part.start)
    return weight, dense


def check(y: Tensor, expected: Tensor) -> None:
    assert (y.double() - expected).norm() < TOLERANCE[y.dtype] * expected.norm()  # NaN fails too


ENDS = [(None, False, True), ("silu", True, False), ("gelu", False, True)]


@pytest.mark.on_cpu(
    "int4 by 128 float16-1-None-(None, False, True)-torch.bfloat16",
    "int4 by 16 with offsets float16-130-(64, 3, 1, 1)-('gelu', False, True)-torch.float16",
    "int8 by 16 with offsets float16-16-(64, 3, 1, 2)-(None, False, True)-torch.float16",
    "int8 by 384 float32-7-None-('silu', True, False)-torch.float16",
    "int4 by 64 bfloat16-33-(16, 2, 4, 1)-('silu', True, False)-torch.bfloat16",
    "int4 by 32 with offsets float32-7-(16, 2, 2, 2)-('gelu', False, True)-torch.bfloat16",
    "int4 by 384 float16-130-None-(None, False, True)-torch.bfloat16",
    "int4 by 128 with offsets float16-33-None-(None, False, True)-torch.bfloat16",
    "int8 by 32 float32-7-None-(None, False, True)-torch.bfloat16",
    "int8 by 128 float16-1-(128, 2, 1, 1)-(None, False, True)-torch.bfloat16",
)
@pytest.mark.parametrize(
    ("format", "tokens", "tile", "end", "dtype"),
    pairwise(
        FORMATS,
        [1, 7, 16, 33, 130],
        [None, (16, 2, 4, 1), (16, 2, 2, 2), (64, 3, 1, 1), (64, 3, 1, 2), (128, 2, 1, 1)],
        ENDS,
        [torch.bfloat16, torch.float16],
    ),
    ids=str,
)
def test_product_equals_that_with_the_dense_weight(
    grouped, grouped_layout, device, format, tokens, tile, end, dtype
):
    activation, is_gated, is_biased = end
    size, columns = 70, 384
    rows = 2 * size if is_gated else size
    weight, dense = make(grouped_layout, format, rows, columns, device)
    x = torch.randn(tokens, columns, device=device).to(dtype)
    bias = torch.randn(rows, device=device).to(dtype) if is_biased else None
    out = torch.full((tokens, size), NAN, dtype=dtype, device=device)
    if tile is not None:
        tile = grouped.Tile(*tile)
        if tile.splits > 1 and tokens > grouped.TOKENS:
            tile = tile._replace(splits=1)
    y = grouped.linear(x, weight, bias, activation, is_gated, out, tile=tile)
    assert y is out
    expected = F.linear(x.double(), dense.double(), None if bias is None else bias.double())
    if is_gated:
        expected, up = expected.chunk(2, 1)
    if activation:
        expected = {"silu": F.silu, "gelu": F.gelu}[activation](expected)
    check(y, expected * up if is_gated else expected)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_expanded_weight_is_exact(grouped, grouped_layout, device, format):
    weight, dense = make(grouped_layout, format, 70, 768, device)
    # The compiler fuses the product with a scale and the sum with an offset.
    rtol = 1e-5 if format.is_shifted else 0
    expanded = grouped_layout.expand(weight, torch.float32)
    torch.testing.assert_close(expanded, dense, rtol=rtol, atol=rtol)
    rows = torch.tensor([69, 0, 33, 33], device=device)
    assert torch.equal(grouped_layout.expand(weight.select(rows), torch.float32), expanded[rows])


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_sizes_are_those_of_the_parts(grouped, grouped_layout, device, format):
    weight, _ = make(grouped_layout, format, 64, 768, device)
    assert weight.values.nbytes == 64 * 768 * format.bits // 8
    groups = 768 // min(format.group, 128)
    assert weight.scales.numel() == groups * 64


@pytest.mark.parametrize(
    ("format", "columns"), [(Format(4, 8), 256), (Format(4, 24), 240), (Format(8, 72), 72)], ids=str
)
def test_other_groups_are_unsupported(grouped_layout, device, format, columns):
    weight, _ = make(grouped_layout, format, 16, columns, device)
    assert weight is None


def test_steps_are_smaller_if_they_do_not_divide_the_columns(grouped, grouped_layout, device):
    weight, dense = make(grouped_layout, Format(4, 64), 32, 3 * 64, device)
    assert (weight.group, weight.columns) == (64, 64)
    x = torch.randn(3, 192, device=device).bfloat16()
    check(grouped.linear(x, weight), F.linear(x.double(), dense.double()))


@pytest.mark.parametrize(
    "shape", [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (768, 768)], ids=str
)
def test_warm_up_has_a_step_for_each_kernel(grouped, grouped_layout, shape):
    from toolkit.kernels import products
    from toolkit.kernels.triton.products.matmul import ROW_CLASSES, late

    with torch.device("meta"):
        weight = grouped_layout.empty(shape, 4, 128, torch.float16, None)

    def kernel(tokens: int) -> tuple[object, ...]:
        padded = min(grouped.TOKENS, 1 << (tokens - 1).bit_length())
        ends = [late(tokens, *end) for end in ((None, False, False), ("gelu", False, False))]
        return grouped.best_tile(weight, tokens), max(8, padded), *ends

    warm = {kernel(tokens) for tokens in (*ROW_CLASSES, *products.MORE_ROW_CLASSES)}
    assert {kernel(tokens) for tokens in range(1, products.GROUPED_TOKENS + 1)} <= warm


def test_weights_in_16_bits_are_kept_if_warm_up_uses_them():
    """Warm-up has steps of the most tokens, and compiles before they are kept."""
    from toolkit.kernels import products
    from toolkit.worker.startup.cache_problem import EXPANDED_TOKENS

    assert EXPANDED_TOKENS >= products.GROUPED_TOKENS


def test_wrong_inputs_are_refused(grouped, grouped_layout, device):
    weight, _ = make(grouped_layout, Format(4, 128), 16, 256, device)
    x = torch.zeros(2, 256, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="256"):
        grouped.linear(x[:, :128].contiguous(), weight)
    with pytest.raises(ValueError, match="float32"):
        grouped.linear(x.float(), weight)
    with pytest.raises(ValueError, match="swish"):
        grouped.linear(x, weight, None, "swish")
    residual = torch.zeros(2, 32, dtype=torch.bfloat16, device=device)
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    with pytest.raises(ValueError, match="residual"):
        grouped.add_norm(x, weight, residual[:, :16], residual[0, :16], 1e-5, sums)
    weight, _ = make(grouped_layout, Format(4, 128), 16, 768, device)
    tile, many = grouped.Tile(64, 2, 1, 2), x.repeat(100, 3)
    with pytest.raises(ValueError, match="splits"):
        grouped.linear(many, weight, tile=tile)
