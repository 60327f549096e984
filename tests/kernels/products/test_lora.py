"""Kernels of LoRA adapters against PyTorch: x Aᵀ, its sum with products, and whole products."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.combinations import pairwise
from tests.kernels.products.test_epilogue import random_int4

SLOTS = 4
FEW_PROGRAMS = 5  # for the interpreter, which takes a millisecond for each
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # relative, in norm
NAN = float("nan")


@pytest.fixture(scope="session")
def kernels(triton) -> SimpleNamespace:
    from toolkit.kernels import products
    from toolkit.kernels.triton.products import grouped_layout, lora, matmul

    return SimpleNamespace(
        grouped_layout=grouped_layout, lora=lora, matmul=matmul, products=products
    )


def make_factors(
    kernels,
    slots: list[int],
    columns: int,
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    parts: int = 1,
    blocks: int = 1,
):
    """Return random adapters, in these slots for the tokens (-1: none).

    Slot i has 1 + i % blocks blocks of ranks. Those that it lacks are NaN, and never read."""
    block = kernels.lora.RANK_BLOCK
    rank = blocks * block
    low = torch.randn(SLOTS, parts, rank, columns, device=device) / columns**0.5
    up = torch.randn(SLOTS, rows, rank, device=device) / rank**0.5
    for slot in range(SLOTS):
        low[slot, :, (1 + slot % blocks) * block :] = NAN
        up[slot, :, (1 + slot % blocks) * block :] = NAN

    def ints(values) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    used = list(dict.fromkeys(one for one in slots if one >= 0))
    return kernels.lora.Factors(
        low.view(SLOTS, parts * rank, columns).to(dtype),
        up.to(dtype),
        ints([1 + slot % blocks for slot in range(SLOTS)]),
        ints([row * parts // rows for row in range(rows)]),
        ints([-(-rows * part // parts) for part in range(parts + 1)]),
        ints([used.index(one) if one >= 0 else -1 for one in slots]),
        ints([len(used), blocks, *used, *[0] * (SLOTS - len(used))]),
    )


def low_of(x: Tensor, factors, token: int) -> tuple[Tensor, Tensor] | None:
    """Return (x Aᵀ [parts, ranks], B [rows, ranks]) of a token's adapter, in fp64."""
    place = int(factors.places[token])
    if place < 0:
        return None
    slot, rank = int(factors.used[2 + place]), factors.up.shape[2]
    ranks = 16 * int(factors.blocks[slot])
    low = factors.low[slot].view(-1, rank, x.shape[1])[:, :ranks].double()
    return low @ x[token].double(), factors.up[slot, :, :ranks].double()


def expected_delta(x: Tensor, factors) -> Tensor:
    """Return what adapters add to each token, in fp64."""
    out = torch.zeros(len(x), factors.up.shape[1], dtype=torch.float64, device=x.device)
    for token in range(len(x)):
        found = low_of(x, factors, token)
        if found is not None:
            out[token] = (found[0][factors.parts.long()] * found[1]).sum(1)
    return out


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    error = (found.double() - expected).norm()
    assert error < TOLERANCE[dtype] * expected.norm()  # NaN fails too


@pytest.fixture(autouse=True)
def few_programs(kernels, device, monkeypatch) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(kernels.lora, "PROGRAMS", FEW_PROGRAMS)
        monkeypatch.setattr(kernels.lora, "MORE_PROGRAMS", FEW_PROGRAMS)


MIXES = {
    "none": [-1],
    "one": [2],
    "with base": [1, -1, -1],
    "all": [3, 0, -1, 2, 1, 2],
}


@pytest.mark.on_cpu(
    "none-1-64-(1, 1)-torch.float32",
    "all-70-600-(1, 1)-torch.bfloat16",
    "one-1-64-(2, 3)-torch.bfloat16",
    "one-3-300-(1, 1)-torch.float16",
    "with base-20-64-(1, 1)-torch.bfloat16",
    "all-1-300-(3, 1)-torch.float16",
)
@pytest.mark.parametrize(
    ("mix", "tokens", "columns", "shape", "dtype"),
    pairwise(
        list(MIXES),
        [1, 3, 20, 70],
        [64, 300, 600],
        [(1, 1), (3, 1), (2, 3)],
        [torch.float32, torch.bfloat16, torch.float16],
    ),
    ids=str,
)
def test_shrink_multiplies_each_token_by_its_own_adapter(
    kernels, device, mix, tokens, columns, shape, dtype
):
    torch.manual_seed(0)
    parts, blocks = shape
    slots = [MIXES[mix][token % len(MIXES[mix])] for token in range(tokens)]
    factors = make_factors(kernels, slots, columns, 50, dtype, device, parts=parts, blocks=blocks)
    x = torch.randn(tokens, columns, device=device).to(dtype)
    delta = kernels.lora.shrink(x, factors)
    for token in range(tokens):
        found = low_of(x, factors, token)
        if found is not None:
            low = delta.low[token].view(parts, -1)[:, : found[1].shape[1]]
            assert_near(low, found[0], dtype)
    filled = kernels.lora.delta(x, factors)
    own = factors.places >= 0
    assert not filled[~own].any()
    if own.any():
        assert_near(filled[own], expected_delta(x, factors)[own], dtype)


def test_shrink_serves_more_adapters_than_programs(kernels, device, monkeypatch):
    """A program then computes several blocks in turn. Twice: the counters are zero again."""
    monkeypatch.setattr(kernels.lora, "PROGRAMS", 3)
    torch.manual_seed(0)
    factors = make_factors(kernels, [0, 1, 2, 3, -1], 600, 8, torch.float32, device, parts=2)
    x = torch.randn(5, 600, device=device)
    for _ in range(2):
        low = kernels.lora.shrink(x, factors).low
        for token in range(4):
            assert_near(low[token].view(2, -1), low_of(x, factors, token)[0], torch.float32)


@pytest.mark.on_cpu(
    "none-(None, False)-1-torch.float32",
    "one-(None, False)-3-torch.bfloat16",
    "one-('silu', True)-2-torch.float32",
    "with base-('silu', True)-1-torch.bfloat16",
    "all-('gelu', False)-1-torch.bfloat16",
)
@pytest.mark.parametrize(
    ("mix", "end", "parts", "dtype"),
    pairwise(
        list(MIXES),
        [(None, False), ("gelu", False), ("silu", True)],
        [1, 2, 3],
        [torch.float32, torch.bfloat16],
    ),
    ids=str,
)
def test_add_delta_ends_any_product(kernels, device, mix, end, parts, dtype):
    torch.manual_seed(0)
    activation, gated = end
    rows, tokens = 140, 10
    slots = [MIXES[mix][token % len(MIXES[mix])] for token in range(tokens)]
    factors = make_factors(kernels, slots, 64, rows, dtype, device, parts=parts, blocks=2)
    x = torch.randn(tokens, 64, device=device).to(dtype)
    y = torch.randn(tokens, rows, device=device).to(dtype)
    expected = ended(y.double() + expected_delta(x, factors), activation, gated)
    out = kernels.products.add_delta(y, x, factors, activation, gated=gated)
    assert_near(out, expected, dtype)


def ended(y: Tensor, activation: str | None, gated: bool) -> Tensor:
    if gated:
        y, up = y.chunk(2, dim=1)
    if activation is not None:
        y = {"gelu": F.gelu, "silu": F.silu}[activation](y)
    return y * up if gated else y


@pytest.mark.on_cpu(
    "plain-1-none-False-(1, 1)",
    "plain-5-one-True-(3, 2)",
    "fp8-70-all-False-(3, 2)",
    "int4-1-all-True-(1, 1)",
)
@pytest.mark.parametrize(
    ("format", "tokens", "mix", "gated", "shape"),
    pairwise(
        ["plain", "fp8", "int4"],
        [1, 5, 70],
        ["none", "one", "all"],
        [False, True],
        [(1, 1), (3, 2)],
    ),
    ids=str,
)
def test_products_add_adapters(kernels, device, format, tokens, mix, gated, shape):
    """Every number of rows: kernels of one row, tiles, and what follows a library's product."""
    torch.manual_seed(0)
    parts, blocks = shape
    columns, rows = 256, 48
    dtype = torch.bfloat16
    slots = [MIXES[mix][token % len(MIXES[mix])] for token in range(tokens)]
    factors = make_factors(kernels, slots, columns, rows, dtype, device, parts=parts, blocks=blocks)
    x = torch.randn(tokens, columns, device=device).to(dtype)
    bias = torch.randn(rows, device=device).to(dtype)
    activation = "silu" if gated else None
    if format == "int4":
        weight = random_int4(kernels, rows, columns, device)
        dense = kernels.grouped_layout.expand(weight, torch.float32)
        out = kernels.products.grouped_product(x, weight, bias, activation, gated, factors=factors)
    else:
        dense = torch.randn(rows, columns, device=device) / columns**0.5
        if format == "fp8":
            if tokens == 70 and device.type == "cpu":
                pytest.skip("torch._scaled_mm needs a GPU")
            values, scales = (dense * 100).to(torch.float8_e4m3fn), torch.full((rows,), 0.01)
            dense = values.float() * 0.01
            out = kernels.products.fp8_product(
                x, values, scales.to(device), bias, activation, gated=gated, factors=factors
            )
        else:
            dense = dense.to(dtype)
            out = kernels.products.product(x, dense, bias, activation, gated=gated, factors=factors)
    y = F.linear(x.double(), dense.double(), bias.double()) + expected_delta(x, factors)
    assert_near(out, ended(y, activation, gated), dtype)


def test_norms_stay_fused_with_adapters(kernels, device):
    """Two products with the norm between them: the second reads rows that are not divided yet."""
    torch.manual_seed(0)
    size, tokens, dtype, eps = 128, 6, torch.bfloat16, 1e-2
    slots = [0, -1, 2, 2, -1, 1]
    x = torch.randn(tokens, size, device=device).to(dtype)
    residual = torch.randn(tokens, size, device=device).to(dtype)
    norm = (torch.rand(size, device=device) + 0.5).to(dtype)
    sums = torch.zeros(tokens, dtype=torch.float64, device=device)
    factors = [make_factors(kernels, slots, size, size, dtype, device, blocks=2) for _ in range(2)]
    weights = [(torch.randn(size, size, device=device) / size**0.5).to(dtype) for _ in range(2)]
    first, second = (one.double().T for one in weights)
    total = (x.double() @ first + expected_delta(x, factors[0]) + residual.double()).to(dtype)
    rows = total.double() * torch.rsqrt(total.double().square().mean(1, keepdim=True) + eps)
    rows = rows * norm.double()
    expected = rows @ second + expected_delta(rows, factors[1])
    products = kernels.products
    unscaled = products.add_norm(x, weights[0], residual, norm, eps, sums, factors=factors[0])
    assert_near(residual, total.double(), dtype)
    assert_near(products.product(unscaled, weights[1], factors=factors[1]), expected, dtype)


@pytest.mark.on_cpu("dtype0-0", "dtype1-20")
@pytest.mark.parametrize("begin", [0, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_table_get_what_their_adapters_add(kernels, device, monkeypatch, begin, dtype):
    """A rank has some of the rows; other tokens get nothing from it."""
    monkeypatch.setattr(kernels.lora, "ROW_CHUNK", 32)
    torch.manual_seed(0)
    size, rows = 50, 30
    slots = [2, -1, 0, 3, 3, 1]
    ids = torch.tensor([3, 5, 29, 45, 21, 20], dtype=torch.int32, device=device)
    factors = make_factors(kernels, slots, rows, size, dtype, device, blocks=2)
    y = torch.randn(len(slots), size, device=device).to(dtype)
    index = ids.long() - begin
    is_own = (index >= 0) & (index < rows)
    one_hot = F.one_hot(index.clamp(0, rows - 1), rows).to(dtype)
    expected = y.double() + expected_delta(one_hot, factors) * is_own[:, None]
    assert_near(kernels.lora.add_rows(y, ids, begin, factors), expected, dtype)
