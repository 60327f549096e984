"""Layers of experts: the reference against a loop over tokens, Triton against the reference."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.combinations import pairwise
from toolkit.kernels import mxfp4, reference
from toolkit.kernels.gates import ClampedSwiGLU, Gate
from toolkit.kernels.reference import Stack
from toolkit.kernels.steps import group_and_step

NAN = float("nan")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}  # relative, in norm
QUANTIZED_TOLERANCE = 0.06  # e4m3 has three digits after the leading one
KINDS = ["", "fp8", "fp8 blocks", "mxfp4", "int4", "int4 with offsets", "int8"]
gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs an NVIDIA GPU of the Hopper generation",
)


@pytest.fixture(scope="session")
def kernels(triton) -> ModuleType:
    from toolkit.kernels.triton.experts import experts

    return experts


@pytest.fixture(autouse=True)
def filled_memory(monkeypatch):
    """Let memory that kernels should not read hold what would be seen."""
    empty = torch.empty
    with torch.device("cpu"):  # which functions this changes is found once: the original ones
        empty(0)

    def filled(*shape: object, **options: object) -> Tensor:
        made = empty(*shape, **options)
        return made.fill_(NAN if made.is_floating_point() else 3)

    monkeypatch.setattr(torch, "empty", filled)


GATES: dict[str, Gate] = {
    "silu": "silu",
    "clamped_swiglu": ClampedSwiGLU(),
    "interleaved": ClampedSwiGLU(limit=0.5, alpha=1.3),
}
"""Activations of experts by their ends: those with biases, and with rows of gate and up in turn."""


@dataclass(frozen=True)
class Case:
    tokens: int
    hidden: int
    size: int
    experts: int
    chosen: int
    activation: Gate = "silu"
    dtype: torch.dtype = torch.float32
    kind: str = ""  # of the weights: of KINDS
    group: int = 128  # columns with one scale of integers
    has_bias: bool = False
    is_interleaved: bool = False


def random_ids(case: Case) -> Tensor:
    """Return different experts for each token, with few of the last ones among them."""
    rank = torch.rand(case.tokens, case.experts) + torch.linspace(0.5, 0, case.experts)
    return rank.argsort(1, descending=True)[:, : case.chosen].int()


def make(case: Case, device: torch.device, ids: Tensor | None = None) -> dict[str, object]:
    """Return arguments of `experts`. Outputs of experts and their rows differ in size."""
    torch.manual_seed(0)
    ids = random_ids(case) if ids is None else ids
    up = torch.randn(case.experts, 2 * case.size, case.hidden) / case.hidden**0.5
    down = torch.randn(case.experts, case.hidden, case.size) / case.size**0.5
    down *= torch.linspace(0.5, 2, case.experts)[:, None, None]
    stacks = {}
    for name, weight in (("up", up), ("down", down)):
        bias = torch.randn(weight.shape[:2]).to(case.dtype) if case.has_bias else None
        values, scale, offset = weight.to(case.dtype), None, None
        if case.kind == "fp8":
            weight *= torch.exp2(torch.linspace(-3, 3, weight.shape[1]))[:, None]
            values, scale = reference.quantize_fp8(weight)
            scale = scale[..., 0].contiguous()
        elif case.kind == "fp8 blocks":
            values, scale = random_blocks_of_fp8(weight)
        elif case.kind == "mxfp4":
            values, scale = random_mxfp4(weight.shape)
        elif case.kind:
            values, scale, offset = random_integers(weight.shape, case)
        moved = (None if one is None else one.to(device) for one in (values, scale, bias, offset))
        stacks[name] = Stack(*moved)
    return stacks | {
        "x": torch.randn(case.tokens, case.hidden).to(device, case.dtype),
        "ids": ids.to(device),
        "weights": (torch.rand(ids.shape) + 0.1).to(device),
        "activation": case.activation,
        "interleaved": case.is_interleaved,
    }


def require_whole_blocks(kind: str, hidden: int, size: int) -> None:
    """Skip a test whose FP8 blocks the kernels refuse. Such layers are loaded in full precision."""
    if kind == "fp8 blocks" and (hidden % 128 or 2 * size % 128):
        pytest.skip("blocks across experts")


def random_blocks_of_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    count, rows, columns = weight.shape
    scale = torch.exp2(torch.randn(count, rows // 128, -(-columns // 128)))
    return (weight * 50).to(reference.FP8), scale / 50


def random_integers(shape: torch.Size, case: Case) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return words of all experts as one weight, seen by expert, with scales and offsets."""
    count, rows, columns = shape
    bits, has_offsets = int(case.kind[3]), "offsets" in case.kind
    group, step = group_and_step(bits, columns, case.group)
    words = torch.randint(-(2**15), 2**15, (columns // step, count, rows, step * bits // 16))
    numbers = torch.rand(2, columns // group, count, rows) + 0.5
    scale = (numbers[0] / 2**bits / columns**0.5).half().transpose(0, 1)
    offset = -(numbers[1] / 2 / columns**0.5).transpose(0, 1) if has_offsets else None
    return words.short().view(torch.uint16).transpose(0, 1), scale, offset


def random_mxfp4(shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Return words and scales in the order of the kernels. Words past the last column are used too,
    since kernels multiply them by zeros."""
    count, rows, columns = shape
    steps = mxfp4.num_groups(columns) // mxfp4.GROUPS
    words = torch.randint(-(2**15), 2**15, (count, steps, rows, mxfp4.GROUP), dtype=torch.int16)
    scales = torch.randint(117, 123, (count, steps, rows, 4), dtype=torch.uint8)
    return words, scales.view(torch.int32)[..., 0].contiguous()


def random_blocks(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a checkpoint's bytes and scales, with all steps, and the weight in fp64."""
    groups = mxfp4.num_groups(columns)
    numbers = torch.randint(16, (rows, groups, 32), dtype=torch.uint8)
    scales = torch.randint(117, 123, (rows, groups), dtype=torch.uint8)
    column = torch.arange(groups * 32).view(groups, 32)
    numbers[:, column >= columns] = 0
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    signed = torch.tensor(table + [-one for one in table], dtype=torch.float64)
    weight = signed[numbers.long()] * 2.0 ** (scales.double() - 127)[..., None]
    return numbers[..., ::2] | numbers[..., 1::2] << 4, scales, weight.flatten(1)[:, :columns]


def rounded(row: Tensor) -> Tensor:
    """Return a row as FP8 holds it, in fp64."""
    values, scale = reference.quantize_fp8(row[None])
    return (values.double() * scale.double())[0]


def wide(stack: Stack, columns: int) -> tuple[Tensor, Tensor]:
    """Return (weight, bias or zeros) in fp64."""
    values, scale, bias, offset = stack
    if values.dtype == torch.int16:
        weight = torch.stack([mxfp4.dequantize(*one) for one in zip(values, scale, strict=True)])
        weight = weight[..., :columns].double()
    elif values.dtype == torch.uint16:
        weight = wide_integers(values, scale, offset, columns)
    elif scale is not None and scale.dim() == 3:
        column, row = torch.arange(columns) // 128, torch.arange(values.shape[1]) // 128
        weight = values.double() * scale.double()[:, row][..., column]
    else:
        weight = values.double() * (1 if scale is None else scale[..., None].double())
    return weight, weight.new_zeros(weight.shape[:2]) if bias is None else bias.double()


def wide_integers(values: Tensor, scale: Tensor, offset: Tensor | None, columns: int) -> Tensor:
    """Return the weight of integers in fp64, one column of it after the other."""
    count, steps, rows, words = values.shape
    step, group = columns // steps, columns // scale.shape[1]
    bits = 16 * words // step
    weight = torch.empty(count, rows, columns, dtype=torch.float64)
    for column in range(columns):
        word = values[:, column // step, :, column % step % words].long()
        number = (word >> column % step // words * bits) % 2**bits
        if offset is None:
            weight[..., column] = scale[:, column // group].double() * (number - 2 ** (bits - 1))
        else:
            part = scale[:, column // group].double() * number
            weight[..., column] = part + offset[:, column // group].double()
    return weight


def by_token(call: dict[str, object], is_quantized: bool = False) -> Tensor:
    """Compute `experts` in fp64, one token and one of its experts after the other.

    is_quantized: with rows of x in FP8."""
    up, up_bias = wide(call["up"], call["x"].shape[1])
    down, down_bias = wide(call["down"], up.shape[1] // 2)
    out = torch.zeros_like(call["x"], dtype=torch.float64)
    for token, ids in enumerate(call["ids"].tolist()):
        x = call["x"][token].double()
        for choice, expert in enumerate(ids):
            if expert >= 0:
                y = up[expert] @ (rounded(x) if is_quantized else x) + up_bias[expert]
                gate, up_y = (y[::2], y[1::2]) if call["interleaved"] else y.chunk(2)
                if isinstance(kind := call["activation"], ClampedSwiGLU):
                    gate = gate.clamp(max=kind.limit)
                    up_y = up_y.clamp(-kind.limit, kind.limit) + 1
                    inner = gate / (1 + torch.exp(-kind.alpha * gate)) * up_y
                else:
                    inner = reference.ACTIVATIONS[call["activation"]](gate) * up_y
                part = down[expert] @ (rounded(inner) if is_quantized else inner)
                part += down_bias[expert]
                out[token] += call["weights"][token, choice].double() * part
    return out


def assert_close(actual: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    assert actual.shape == expected.shape
    difference = (actual.double() - expected.double()).norm()
    limit = tolerance or TOLERANCE[actual.dtype]
    assert difference <= limit * expected.double().norm()  # NaN fails too


def compute(
    kernels,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Stack,
    down: Stack,
    activation: str,
    interleaved: bool = False,
    tiles: object = None,
) -> Tensor:
    """Return what a new layer of the kernels computes, with the arguments of the reference."""
    return kernels.Layer(up, down, activation, interleaved)(x, ids, weights, tiles)


def check(kernels, call: dict[str, object], tiles: object = None) -> None:
    y = compute(kernels, **call, tiles=tiles)
    assert y.dtype == call["x"].dtype
    sizes = y.shape[1], call["up"].values.shape[-2] // 2
    up, down = (
        kernels.Operand.of(call[name], size)
        for name, size in zip(("up", "down"), sizes, strict=True)
    )
    used = tiles or kernels.best_tiles(*call["ids"].shape, up, down)
    is_quantized = used.quantizes_x and (up.is_fp8 or down.is_fp8)
    assert_close(y, reference.experts(**call), QUANTIZED_TOLERANCE if is_quantized else None)


def tiles(kernels, tokens: int, rows: int = 32, columns: int = 32) -> object:
    tile = kernels.Tile(tokens, rows, columns, 2, 4)
    return kernels.Tiles(tile, tile._replace(rows=64))


# The reference


@pytest.mark.parametrize("kind", KINDS)
def test_reference_equals_a_loop_over_tokens(kind):
    hidden, size = (384, 128) if kind[3:] else (20, 12)
    call = make(Case(7, hidden, size, 5, 2, "gelu_tanh", kind=kind), torch.device("cpu"))
    call["ids"][3] = -1
    call["ids"][4, 0] = -1
    assert_close(reference.experts(**call), by_token(call))
    assert not reference.experts(**call)[3].any()


def test_reference_equals_a_plain_product_for_one_expert():
    call = make(Case(5, 20, 12, 1, 1), torch.device("cpu"), torch.zeros(5, 1, dtype=torch.int32))
    gate, up = F.linear(call["x"], call["up"].values[0]).chunk(2, dim=1)
    expected = F.linear(F.silu(gate) * up, call["down"].values[0]) * call["weights"]
    assert_close(reference.experts(**call), expected)


# Triton: compiled if there is a GPU, else interpreted


@pytest.mark.on_cpu(
    "torch.float32-(128, 64, 8, 2)-1--silu",
    "torch.float16-(1, 1, 2, 2)-1-mxfp4-clamped_swiglu",
    "torch.bfloat16-(1, 1, 2, 2)-2--interleaved",
    "torch.float32-(33, 19, 6, 1)-33--clamped_swiglu",
    "torch.bfloat16-(48, 80, 4, 3)-1-fp8-interleaved",
    "torch.float32-(1, 1, 2, 2)-11-fp8-silu",
)
@pytest.mark.parametrize(
    ("dtype", "sizes", "tokens", "kind", "end"),
    pairwise(
        DTYPES,
        [(128, 64, 8, 2), (48, 80, 4, 3), (33, 19, 6, 1), (1, 1, 2, 2)],
        [1, 2, 11, 33],
        ["", "fp8", "mxfp4"],
        ["silu", "clamped_swiglu", "interleaved"],
    ),
    ids=str,
)
def test_sizes_and_types(kernels, device, dtype, sizes, tokens, kind, end):
    """Ends: of experts with biases, and rows of gate and up in turn."""
    if device.type == "cuda" and kind == "fp8" and dtype == torch.float32:
        pytest.skip("on a GPU, FP8 weights need 16-bit activations (toolkit.weights.kinds.fp8)")
    if kind == "mxfp4" and dtype == torch.float16:
        pytest.skip("MXFP4 needs bf16 or fp32")
    has_bias, is_interleaved = end != "silu", end == "interleaved"
    activation = GATES[end]
    case = Case(tokens, *sizes, activation, dtype, kind, 128, has_bias, is_interleaved)
    check(kernels, make(case, device))


@pytest.mark.on_cpu(
    "fp8 blocks-(384, 128, 5, 3)-7-torch.bfloat16-clamped_swiglu",
    "int4-(128, 128, 8, 2)-16-torch.bfloat16-interleaved",
    "int4 with offsets-(64, 64, 4, 2)-33-torch.bfloat16-silu",
    "int8-(256, 192, 3, 1)-1-torch.bfloat16-interleaved",
    "int4-(64, 64, 4, 2)-150-torch.float16-clamped_swiglu",
    "fp8 blocks-(64, 64, 4, 2)-1-torch.float16-silu",
)
@pytest.mark.parametrize(
    ("kind", "sizes", "tokens", "dtype", "end"),
    pairwise(
        ["fp8 blocks", "int4", "int4 with offsets", "int8"],
        [(128, 128, 8, 2), (384, 128, 5, 3), (256, 192, 3, 1), (64, 64, 4, 2)],
        [1, 7, 16, 33, 150],
        [torch.float16, torch.bfloat16],
        ["silu", "clamped_swiglu", "interleaved"],
    ),
    ids=str,
)
def test_scales_of_groups_and_blocks(kernels, device, kind, sizes, tokens, dtype, end):
    require_whole_blocks(kind, *sizes[:2])
    has_bias, is_interleaved = end != "silu", end == "interleaved"
    activation = GATES[end]
    case = Case(tokens, *sizes, activation, dtype, kind, 128, has_bias, is_interleaved)
    check(kernels, make(case, device))


@pytest.mark.on_cpu(
    "-(384, 64, 3, 1)-torch.float16-silu",
    "fp8-(384, 64, 3, 1)-torch.bfloat16-interleaved",
)
@pytest.mark.parametrize(
    ("kind", "sizes", "dtype", "end"),
    pairwise(
        ["", "fp8"],
        [(384, 64, 3, 1), (128, 192, 5, 3)],
        [torch.float16, torch.bfloat16],
        ["silu", "clamped_swiglu", "interleaved"],
    ),
    ids=str,
)
def test_one_token_in_registers(kernels, device, monkeypatch, kind, sizes, dtype, end):
    """Rows are of several tiles, and end within one. Of several experts, the last one is absent."""
    monkeypatch.setattr(kernels, "VECTOR", 128)
    has_bias, is_interleaved = end != "silu", end == "interleaved"
    activation = GATES[end]
    case = Case(1, *sizes, activation, dtype, kind, 128, has_bias, is_interleaved)
    call = make(case, device)
    call["ids"][0, 1:][-1:] = -1
    stacks = zip((call["up"], call["down"]), sizes, strict=False)
    assert kernels.uses_vector(*(kernels.Operand.of(*one) for one in stacks))
    check(kernels, call)


@pytest.mark.on_cpu("1-gelu_tanh", "5-relu", "20-gelu_tanh")
@pytest.mark.parametrize("kind", ["gelu_tanh", "relu"])
@pytest.mark.parametrize("tokens", [1, 5, 20])
def test_activations(kernels, device, tokens, kind):
    check(kernels, make(Case(tokens, 32, 16, 4, 2, kind), device))


@pytest.mark.on_cpu("8-", "16-fp8", "64-", "128-")
@pytest.mark.parametrize("kind", ["", "fp8"])
@pytest.mark.parametrize("tokens", [8, 16, 64, 128])
def test_wide_and_narrow_tiles(kernels, device, tokens, kind):
    """Blocks of one expert, several of them, and experts that are not full."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    call = make(Case(150, 48, 24, 3, 2, dtype=dtype, kind=kind), device)
    check(kernels, call, tiles=tiles(kernels, tokens))


@pytest.mark.on_cpu("64")
@pytest.mark.parametrize("tokens", [64, 128])
def test_large_blocks_of_fp8_weights_quantize_x(kernels, device, tokens):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    call = make(Case(80, 48, 24, 3, 2, dtype=dtype, kind="fp8"), device)
    call["x"] *= torch.exp2(torch.arange(80, device=device) % 5)[:, None].to(dtype)
    y = compute(kernels, **call, tiles=tiles(kernels, tokens))
    assert_close(y, by_token(call, is_quantized=True), 0.01)
    assert (y - reference.experts(**call)).norm() > 0.015 * y.norm()


@pytest.mark.on_cpu("3-True", "40-False")
@pytest.mark.parametrize("in_tile", [True, False])
@pytest.mark.parametrize("experts", [3, 40])
def test_few_tokens_with_and_without_blocks(kernels, device, experts, in_tile):
    """In one tile, programs are for experts or, if those are more, for pairs."""
    call = make(Case(9, 32, 16, experts, 3), device)
    check(kernels, call, tiles=tiles(kernels, 16 if in_tile else 8))


@pytest.mark.on_cpu("first-1", "first-16", "first-40", "first-70", "last-5")
@pytest.mark.parametrize("tokens", [1, 5, 16, 40, 70])
@pytest.mark.parametrize("which", ["first", "last"])
def test_all_tokens_to_one_expert(kernels, device, which, tokens):
    ids = torch.full((tokens, 1), 0 if which == "first" else 5, dtype=torch.int32)
    check(kernels, make(Case(tokens, 32, 16, 6, 1), device, ids))


@pytest.mark.parametrize("tokens", [3, 40])
def test_experts_without_tokens_are_not_read(kernels, device, tokens):
    call = make(Case(tokens, 32, 16, 9, 2), device)
    call["ids"] = call["ids"] % 2 * 3 + torch.tensor([1, 2], dtype=torch.int32, device=device)
    expected = reference.experts(**call)
    others = sorted(set(range(9)) - set(call["ids"].flatten().tolist()))
    assert len(others) == 5
    call["up"].values[others] = call["down"].values[others] = NAN
    assert_close(compute(kernels, **call), expected)


@pytest.mark.on_cpu("(6, 4)")
@pytest.mark.parametrize("shape", [(1, 1), (6, 6), (6, 4), (40, 40), (40, 33)], ids=str)
def test_padding_is_zero_and_does_not_spread(kernels, device, shape):
    """Rows of padding may hold anything, and so may the weights of choices without an expert."""
    tokens, padding = shape
    call = make(Case(tokens, 32, 16, 4, 2), device)
    call["ids"][tokens - padding :] = -1
    call["ids"][0, 1] = -1
    expected = reference.experts(**call)
    for name in ("x", "weights"):
        call[name][tokens - padding :] = NAN
    call["weights"][0, 1] = NAN
    y = compute(kernels, **call)
    assert (y[tokens - padding :] == 0).all()
    assert_close(y, expected)


@pytest.mark.on_cpu("5")
@pytest.mark.parametrize("tokens", [5, 50])
def test_a_token_does_not_depend_on_its_place(kernels, device, tokens):
    """Sums are in the order of choices, so the same tokens in another order have equal bits."""
    call = make(Case(tokens, 64, 48, 6, 3, dtype=torch.bfloat16), device)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(1)).to(device)
    moved = {name: call[name][order].contiguous() for name in ("x", "ids", "weights")}
    assert torch.equal(compute(kernels, **call | moved), compute(kernels, **call)[order])


def test_no_tokens_have_no_results(kernels, device):
    call = make(Case(0, 32, 16, 4, 2), device)
    assert compute(kernels, **call).shape == (0, 32)


@pytest.mark.on_cpu(
    "torch.bfloat16-(2048, 768)-2-8",
    "torch.float8_e4m3fn-(4096, 14336)-4-60",
    "torch.int16-(2048, 768)-8-128",
)
@pytest.mark.parametrize("num_experts", [8, 60, 128])
@pytest.mark.parametrize("chosen", [2, 4, 8])
@pytest.mark.parametrize("sizes", [(2048, 768), (4096, 14336)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, reference.FP8, torch.int16], ids=str)
def test_tiles_are_equal_within_a_class_of_tokens(kernels, num_experts, chosen, sizes, dtype):
    """Warm-up compiles the kernels of one number of tokens per class."""
    from toolkit.worker.step_sizes import MIXED, sizes_below

    weight = Stack(torch.empty(num_experts, 2, 1, dtype=dtype, device="meta"))
    up, down = (kernels.Operand.of(weight, columns) for columns in sizes)
    matmul_classes = {1, 8, 16, 32, 48, 64}
    assert set(kernels.ROW_CLASSES) <= matmul_classes | set(sizes_below(8193, MIXED))

    def choice(n: int) -> tuple[object, bool]:
        best = kernels.best_tiles(n, chosen, up, down)
        return best, best.hold(n)

    last = kernels.ROW_CLASSES[-1]
    for n in range(2, last + 10):
        most = next((one for one in kernels.ROW_CLASSES if one >= n), 4 * last)
        assert choice(n) == choice(most), n


@pytest.mark.parametrize(
    ("num_experts", "tokens"), [(60, 32), (64, 16), (128, 16), (33, 32), (32, 32)]
)
def test_blocks_have_room_for_twice_the_mean(kernels, num_experts, tokens):
    """64 tokens have 8 experts each: an expert has 512 / num_experts of them on average."""
    up = kernels.Operand.of(Stack(torch.empty(num_experts, 2, 1, device="meta")), 64)
    assert kernels.best_tiles(64, 8, up, up).up.tokens == tokens


def test_unsupported_inputs_are_errors(kernels):
    call = make(Case(2, 16, 32, 4, 2, has_bias=True), torch.device("cpu"))
    fp8 = make(Case(2, 16, 32, 4, 2, kind="fp8"), torch.device("cpu"))
    mx = make(Case(2, 16, 32, 4, 2, kind="mxfp4"), torch.device("cpu"))
    up, bias = call["up"], call["up"].bias
    short = fp8["down"].scale[:, 1:].contiguous()
    for change, message in (
        ({"activation": "swish"}, "not one of"),
        ({"x": call["x"].T.contiguous().T}, "contiguous"),
        ({"up": Stack(up.values[:, 1:].contiguous())}, "down must be"),
        ({"ids": call["ids"].long()}, "must be int32"),
        ({"ids": call["ids"][:1], "weights": call["weights"][:1]}, "ids of 1 tokens"),
        ({"up": Stack(up.values.bfloat16())}, "up must be"),
        ({"up": Stack(fp8["up"].values)}, "up must be"),
        (fp8 | {"down": fp8["down"]._replace(scale=short)}, "the scales of down must be"),
        ({"up": up._replace(bias=bias[:, 1:].contiguous())}, "the bias of up must be"),
        ({"up": up._replace(bias=bias.bfloat16())}, "the bias of up must be"),
        ({"up": mx["up"]._replace(scale=None)}, "MXFP4 has scales"),
        ({"up": mx["up"], "down": mx["down"], "x": call["x"].half()}, "MXFP4 has scales"),
    ):
        with pytest.raises(ValueError, match=message):
            compute(kernels, **call | change)


def test_mxfp4_is_dequantized_exactly():
    """Numbers and scales of the specification, in the order of checkpoints and of kernels."""
    torch.manual_seed(0)
    blocks, scales, expected = random_blocks(9, 300)
    mxfp4.arrange_(blocks, scales)
    words = blocks.view(-1).view(torch.int16).view(-1, 9, 32)
    actual = mxfp4.dequantize(words, scales.view(-1).view(torch.int32).view(-1, 9))
    assert torch.equal(actual[:, :300].double(), expected)
    assert not actual[:, 300:].any()


@pytest.mark.parametrize("exponent", [8, 127, mxfp4.MAX_SCALE])
def test_kernels_have_the_numbers_of_mxfp4_exactly(kernels, device, exponent):
    """In fp32. The inner row of token t is 36 in one column, whose numbers are t."""

    def stack(numbers: Tensor, exponent: int) -> Stack:
        blocks = (numbers[:, ::2] | numbers[:, 1::2] << 4).view(-1, 4, 16)
        scales = torch.full((len(numbers), 4), exponent).byte()
        mxfp4.arrange_(blocks, scales)
        words = blocks.view(-1).view(torch.int16).view(1, 1, -1, 32)
        return Stack(words.to(device), scales.view(torch.int32).view(1, 1, -1).to(device))

    token = torch.arange(16)
    column = 16 * (token % 8) + token
    up = torch.zeros(256, 128, dtype=torch.uint8)
    up[column, token] = up[128 + column, token] = 7  # relu(6) * 6
    down = (torch.arange(128) % 16).byte().expand(128, 128)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    expected = 36 * torch.cat((table, -table)) * 2.0 ** (exponent - 127)
    y = compute(
        kernels,
        torch.eye(16, 128, device=device),
        torch.zeros(16, 1, dtype=torch.int32, device=device),
        torch.ones(16, 1, device=device),
        stack(up, 127),
        stack(down, exponent),
        "relu",
    )
    assert torch.equal(y.double().cpu(), expected[:, None].expand(16, 128))


# Real sizes, compiled


REAL = [
    Case(0, 2048, 768, 128, 8),  # Qwen3-30B-A3B
    Case(0, 4096, 14336, 8, 2),  # Mixtral 8x7B
    Case(0, 2048, 1024, 64, 8),  # OLMoE
    Case(0, 2880, 2880, 32, 4),  # gpt-oss-20b
    Case(0, 2048, 1408, 64, 6),  # DeepSeek-V2-Lite
]
SIZES = [1, 2, 7, 16, 17, 64, 300, 3000]
CLAMPED = Case(
    700,
    208,
    144,
    8,
    2,
    ClampedSwiGLU(),
    torch.bfloat16,
    "mxfp4",
    has_bias=True,
    is_interleaved=True,
)
PLAIN: dict[str, object] = {"activation": "silu", "has_bias": False}
CHANGES: list[dict[str, object]] = [
    {},
    PLAIN,
    PLAIN | {"is_interleaved": False, "tokens": 3000},
    {"hidden": 2880, "size": 2880, "tokens": 999, "experts": 32, "chosen": 4},
    {"hidden": 16, "size": 32, "activation": "gelu_tanh"},
]


def make_real(case: Case, device: torch.device) -> dict[str, object]:
    with torch.device(device):
        call = make(replace(case, dtype=torch.bfloat16), device)
    return call | {"weights": call["weights"] / case.chosen}


@gpu
@needs_gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", REAL, ids=str)
def test_experts_of_real_sizes(kernels, device, case, kind):
    """A second call has the same bits, although programs run in another order."""
    require_whole_blocks(kind, case.hidden, case.size)
    is_mxfp4 = kind == "mxfp4"
    activation = ClampedSwiGLU() if is_mxfp4 else "silu"
    case = replace(case, activation=activation, has_bias=is_mxfp4, is_interleaved=is_mxfp4)
    call = make_real(replace(case, tokens=SIZES[-1], kind=kind), device)
    for tokens in SIZES:
        part = {name: call[name][:tokens] for name in ("x", "ids", "weights")}
        check(kernels, call | part)
        assert torch.equal(compute(kernels, **call | part), compute(kernels, **call | part))


@pytest.mark.parametrize(
    ("changes", "tokens", "suits"),
    [
        ({}, 600, True),
        ({"activation": "silu", "has_bias": False, "is_interleaved": False}, 600, True),
        ({}, 60, False),  # blocks of fewer pairs
        ({"kind": "fp8"}, 600, False),
        ({"dtype": torch.float32}, 600, False),
        ({"hidden": 72}, 600, False),
        ({"size": 40}, 600, False),
    ],
    ids=str,
)
def test_layers_that_suit_hopper(kernels, monkeypatch, changes, tokens, suits):
    monkeypatch.setattr(kernels, "is_hopper", lambda device: True)
    case = replace(CLAMPED, **{"tokens": tokens} | changes)
    call = make(case, torch.device("cpu"))
    layer = kernels.Layer(call["up"], call["down"], call["activation"], call["interleaved"])
    best = kernels.best_tiles(tokens, case.chosen, layer._up, layer._down)
    assert layer._suits_hopper(call["x"], case.chosen, best) == suits
    calls = []
    for name in ("_multiply", "_multiply_on_hopper"):
        monkeypatch.setattr(kernels.Layer, name, lambda *_, name=name: calls.append(name))
    monkeypatch.setattr(kernels, "arrange", lambda *_: kernels.Blocks(128, *call["ids"][:2]))
    monkeypatch.setattr(kernels, "sum_kernel", defaultdict(lambda: lambda *_, **__: None))
    layer(call["x"], call["ids"], call["weights"])
    layer(call["x"], call["ids"], call["weights"], best)
    assert calls == ["_multiply_on_hopper" if suits else "_multiply", "_multiply"]


def test_addresses_that_suit_hopper(kernels, monkeypatch):
    monkeypatch.setattr(kernels, "is_hopper", lambda device: True)
    call = make(CLAMPED, torch.device("cpu"))
    up, down, x = call["up"], call["down"], call["x"]
    best = kernels.best_tiles(
        len(x), 2, kernels.Operand.of(up, x.shape[1]), kernels.Operand.of(down, CLAMPED.size)
    )

    def suits(x: Tensor, up: Stack, down: Stack, chosen: int = 2) -> bool:
        layer = kernels.Layer(up, down, CLAMPED.activation, True)
        found: bool = layer._suits_hopper(x, chosen, best)
        return found

    def moved(one: Tensor) -> Tensor:
        """Return a copy that begins 2 bytes after a multiple of 16."""
        return one.new_empty(one.numel() + 1)[1:].view(one.shape).copy_(one)

    assert suits(x, up, down)
    assert not suits(moved(x), up, down)
    assert not suits(x, up._replace(values=moved(up.values)), down)
    assert not suits(x, up, down._replace(values=moved(down.values)))
    most = (1 << 31) // (len(x) * CLAMPED.hidden)
    assert suits(x, up, down, most)
    assert not suits(x, up, down, most + 1)


@gpu
@needs_hopper
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_kernels_of_hopper_have_the_same_bits(kernels, device, monkeypatch, changes):
    """With experts that no token chose, padding, and a token of NaN, which others do not see."""
    own, calls = kernels.Layer._multiply_on_hopper, []
    monkeypatch.setattr(
        kernels.Layer, "_multiply_on_hopper", lambda *args: calls.append(1) or own(*args)
    )
    case = replace(CLAMPED, **changes)
    call = make(case, device)
    call["ids"][5:9] = -1
    best = kernels.best_tiles(
        case.tokens,
        case.chosen,
        kernels.Operand.of(call["up"], case.hidden),
        kernels.Operand.of(call["down"], case.size),
    )
    expected = compute(kernels, **call, tiles=best)
    assert torch.equal(compute(kernels, **call), expected)
    assert_close(expected, reference.experts(**call))
    call["x"][3] = NAN
    y = compute(kernels, **call)
    assert y[3].isnan().all()
    assert y[5:9].eq(0).all()
    assert torch.equal(y[4:], expected[4:])
    assert torch.equal(y[:3], expected[:3])
    assert len(calls) == 2


@gpu
@needs_gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", SIZES)
def test_layers_do_not_depend_on_early_launches(kernels, device, monkeypatch, tokens, kind):
    """In a graph, kernels that are launched early read nothing before it is written."""
    from toolkit.kernels.triton.experts import routing
    from toolkit.kernels.triton.products import fp8, fp8_matmul

    call = make_real(Case(tokens, 1024, 512, 32, 4, kind=kind), device)
    del call["x"], call["ids"], call["weights"]
    start = torch.randn(tokens, 1024, device=device).bfloat16()
    logits = torch.randn(6, tokens, 32, device=device)

    def run() -> Tensor:
        x = start
        for each in logits:
            ids, weights = routing.route(each, reference.Routing(4, renormalize=True))
            for _ in range(2):
                x = compute(kernels, x=x, ids=ids, weights=weights, **call)
                x = x * (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt().bfloat16()
        return x

    with monkeypatch.context() as patch:
        for module in (kernels, routing, fp8, fp8_matmul):
            patch.setattr(module, "supported", lambda _: False)
        expected = run()
    assert expected.isfinite().all()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):  # which has counters then: zeroing them would separate kernels
        run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        y = run()
    for _ in range(3):
        y.zero_()
        graph.replay()
        assert torch.equal(y, expected)
