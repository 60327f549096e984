"""Products of few rows: the reference against PyTorch, Triton against the reference."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.combinations import pairwise
from toolkit.kernels import reference

NAN = float("nan")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # relative, in norm
gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@dataclass(frozen=True)
class Case:
    tokens: int
    size: int
    in_features: int
    activation: str | None = None
    gated: bool = False
    biased: bool = False
    dtype: torch.dtype = torch.float32


@pytest.fixture(scope="session")
def linears(triton):
    from toolkit.kernels.triton.products import linear

    return linear


def make(case: Case, device: torch.device) -> dict[str, object]:
    torch.manual_seed(0)
    rows = case.size * (2 if case.gated else 1)
    weight = torch.randn(rows, case.in_features, device=device) / case.in_features**0.5
    return {
        "x": torch.randn(case.tokens, case.in_features, device=device).to(case.dtype),
        "weight": weight.to(case.dtype),
        "bias": torch.randn(rows, device=device).to(case.dtype) if case.biased else None,
        "activation": case.activation,
        "gated": case.gated,
    }


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    difference = (actual.double() - expected.double()).norm() / expected.double().norm().clamp(
        min=1e-30
    )
    assert difference < TOLERANCE[actual.dtype]  # NaN fails too


def check(linears, case: Case, device: torch.device) -> None:
    call = make(case, device)
    out = torch.full((case.tokens, case.size), NAN, dtype=case.dtype, device=device)
    assert linears.linear(**call, out=out) is out
    assert_close(out, reference.linear(**call))


def test_reference_equals_pytorch():
    call = make(Case(3, 8, 32, "silu", gated=True, biased=True), torch.device("cpu"))
    gate, up = F.linear(call["x"], call["weight"], call["bias"]).chunk(2, dim=1)
    assert_close(reference.linear(**call), F.silu(gate) * up)
    call = make(Case(3, 8, 32, "gelu", biased=True), torch.device("cpu"))
    assert_close(
        reference.linear(**call), F.gelu(F.linear(call["x"], call["weight"], call["bias"]))
    )


@pytest.mark.on_cpu(
    "torch.float32-(64, 768)-1",
    "torch.float16-(1040, 1024)-16",
    "torch.bfloat16-(33, 100)-2",
    "torch.float32-(1, 1)-1",
    "torch.float32-(16, 2048)-7",
)
@pytest.mark.parametrize(
    ("dtype", "sizes", "tokens"),
    pairwise(DTYPES, [(64, 768), (16, 2048), (1040, 1024), (33, 100), (1, 1)], [1, 2, 7, 16]),
    ids=str,
)
def test_sizes_and_dtypes(linears, device, dtype, sizes, tokens):
    check(linears, Case(tokens, *sizes, dtype=dtype), device)


@pytest.mark.on_cpu(
    "torch.float32-100-768-17",
    "torch.float32-20-100-17",
    "torch.float16-1-2048-40",
    "torch.bfloat16-64-128-64",
)
@pytest.mark.parametrize("tokens", [17, 40, 64])
@pytest.mark.parametrize(("size", "in_features"), [(64, 128), (100, 768), (1, 2048), (20, 100)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_more_rows(linears, device, dtype, size, in_features, tokens):
    check(linears, Case(tokens, size, in_features, dtype=dtype), device)


@pytest.mark.on_cpu(
    "(1, 600)-16-True", "(2, 640)-32-True", "(4, 640)-64-False", "(3, 600)-16-False"
)
@pytest.mark.parametrize(
    ("split", "rows", "gated"),
    pairwise([(1, 600), (2, 640), (3, 600), (4, 640)], [16, 32, 64], [True, False]),
    ids=str,
)
def test_tiles_split_over_programs(linears, device, gated, rows, split):
    """The second run finds the counters as the first run left them."""
    splits, in_features = split
    call = make(Case(20, 70, in_features, "silu", gated=gated, biased=True), device)
    for _ in range(2):
        out = torch.full((20, 70), NAN, device=device)
        tile = linears.matmul.Tile(rows, stages=2, splits=splits)
        linears.matmul.matmul(**call, scale=None, out=out, tile=tile)
        assert_close(out, reference.linear(**call))


@pytest.mark.on_cpu("True-8-4-2-1024", "True-8-4-13-640", "True-32-2-7-600", "False-16-2-30-80")
@pytest.mark.parametrize(("tokens", "in_features"), [(2, 1024), (7, 600), (13, 640), (30, 80)])
@pytest.mark.parametrize(("rows", "parts"), [(8, 4), (16, 2), (16, 4), (32, 2)])
@pytest.mark.parametrize("gated", [True, False])
def test_tiles_split_over_warps(linears, device, gated, rows, parts, tokens, in_features):
    call = make(Case(tokens, 37, in_features, "silu", gated=gated, biased=True), device)
    out = torch.full((tokens, 37), NAN, device=device)
    tile = linears.matmul.Tile(rows, stages=2, parts=parts)
    linears.matmul.matmul(**call, scale=None, out=out, tile=tile)
    assert_close(out, reference.linear(**call))


@pytest.mark.on_cpu(
    "end0-1-256-True",
    "end2-20-256-False",
    "end5-3-256-True",
    "end7-1-256-False",
    "end9-3-1100-False",
    "end10-1-256-True",
)
@pytest.mark.parametrize(
    ("end", "tokens", "in_features", "biased"),
    pairwise(
        [
            ("silu", True),
            (None, True),
            ("gelu_tanh", True),
            ("gelu_tanh", False),
            ("gelu", False),
            ("relu", False),
        ],
        [1, 3, 20],
        [256, 1100],
        [True, False],
    ),
)
def test_bias_activation_and_gate(linears, device, end, biased, in_features, tokens):
    activation, gated = end
    check(linears, Case(tokens, 20, in_features, activation, gated, biased), device)


@pytest.mark.on_cpu("1000-2-True", "2304-12-True", "3072-40-False", "6000-20-False", "40000-2-True")
@pytest.mark.parametrize(
    ("num_rows", "tokens", "gated"),
    pairwise([1000, 2304, 3072, 6000, 40_000], [2, 12, 20, 40], [True, False]),
)
def test_best_tiles_cover_every_size(linears, device, num_rows, tokens, gated):
    """The product has few outputs, to keep the interpreter fast. `num_rows` selects the tile."""
    for in_features in (512, 1040, 2048):
        tile = linears.matmul.best_tile(tokens, num_rows, in_features)
        call = make(Case(tokens, tile.rows + 3, in_features, gated=gated), device)
        out = torch.full((tokens, tile.rows + 3), NAN, device=device)
        linears.matmul.matmul(**call, scale=None, out=out, tile=tile)
        assert_close(out, reference.linear(**call))


# Norms between products


def check_norm(linears, device, dtype, tokens, hidden, in_features, tile=None) -> None:
    """Compare fused (product, residual sum, norm, gated product) with separate steps."""
    call = make(Case(tokens, hidden, in_features, biased=True, dtype=dtype), device)
    x, weight, bias = call["x"], call["weight"], call["bias"]
    residual = (3 * torch.randn(tokens, hidden, device=device)).to(dtype)
    # As Gemma's, in fp32 while the rows are not.
    norm_weight = torch.rand(hidden, device=device) + 0.5
    following = make(Case(tokens, 70, hidden, "silu", gated=True, biased=True, dtype=dtype), device)
    del following["x"]
    y = reference.linear(x, weight, bias)
    rms = reference.Norm(norm_weight, None, 1e-5, False)
    (expected,), total = reference.join(y, residual.clone(), [rms])
    square_sums = torch.zeros(tokens, dtype=torch.float64, device=device)
    if tile is None:
        unscaled = linears.add_norm(x, weight, residual, norm_weight, 1e-5, square_sums, bias)
    else:
        norm = linears.matmul.Norm(residual, norm_weight, 1e-5, square_sums)
        unscaled = linears.matmul.add_norm(x, weight, bias, norm, tile)
    assert len(unscaled) == tokens
    assert_close(residual, total)
    assert_close(linears.linear(unscaled, **following), reference.linear(expected, **following))


@pytest.mark.on_cpu(
    "64-16",
    "64-32768",
    "64-151936",
    "512-1024",
    "896-1025",
    "1024-3072",
    "2048-4096",
    "4096-8448",
    "14336-8449",
)
@pytest.mark.parametrize("num_rows", [16, 1024, 1025, 3072, 4096, 8448, 8449, 32768, 151936])
@pytest.mark.parametrize("in_features", [64, 512, 896, 1024, 2048, 4096, 14336])
def test_choices_are_equal_within_a_class_of_rows(linears, num_rows, in_features):
    """Warm-up compiles the kernels of one number of rows per class."""
    from toolkit.kernels.triton.products import fp8

    matmul = linears.matmul
    weight = torch.empty(num_rows, in_features, dtype=torch.bfloat16, device="meta")

    def choices(n: int) -> list:
        tiles = [f(n, num_rows, in_features) for f in (matmul.best_tile, matmul.best_tile_of_fp8)]
        kinds = [(None, False, False), (None, True, False), (None, False, True)]
        kinds.append(("gelu", False, False))
        return [
            *tiles,
            *(matmul._padded(n, tile) for tile in tiles),
            *(matmul.late(n, *kind) for kind in kinds),
            linears.fits(n, weight),
            n <= fp8.TOKENS,
        ]

    for n in range(1, matmul.MAX_TOKENS + 1):
        assert choices(n) == choices(next(c for c in matmul.ROW_CLASSES if c >= n))


@pytest.mark.on_cpu(
    "2-(64, 128)-torch.float32",
    "16-(64, 128)-torch.bfloat16",
    "20-(64, 128)-torch.float32",
    "64-(100, 600)-torch.bfloat16",
    "7-(1030, 256)-torch.float32",
)
@pytest.mark.parametrize(
    ("tokens", "sizes", "dtype"),
    pairwise(
        [2, 7, 16, 20, 64],
        [(64, 128), (100, 600), (1030, 256)],
        [torch.float32, torch.bfloat16],
    ),
    ids=str,
)
def test_norms_between_products(linears, device, dtype, sizes, tokens):
    hidden, in_features = sizes
    check_norm(linears, device, dtype, tokens, hidden, in_features)


@pytest.mark.on_cpu(
    "(16, 2, 1, 1)-5",
    "(64, 2, 1, 2)-5",
    "(32, 2, 1, 3)-20",
    "(8, 2, 4, 1)-50",
    "(16, 2, 2, 1)-20",
    "(16, 2, 2, 2)-5",
)
@pytest.mark.parametrize(
    ("tile", "tokens"),
    [
        ((16, 2, 1, 1), 5),
        ((16, 2, 1, 1), 50),
        ((64, 2, 1, 2), 5),
        ((64, 2, 1, 2), 20),
        ((32, 2, 1, 3), 20),
        ((32, 2, 1, 3), 50),
        ((8, 2, 4, 1), 5),
        ((8, 2, 4, 1), 50),
        ((16, 2, 2, 1), 20),
        ((16, 2, 2, 2), 5),
        ((16, 2, 2, 2), 50),
    ],
    ids=str,
)
def test_norms_after_every_kind_of_tile(linears, device, tile, tokens):
    for _ in range(2):  # the second run finds the counters as the first run left them
        check_norm(linears, device, torch.float32, tokens, 100, 640, linears.matmul.Tile(*tile))


def test_unsupported_norms_between_products_are_errors(linears, device):
    def add_norm(
        tokens: int, dtype: torch.dtype, residual: tuple[int, int] = (4, 8), square_sums: int = 0
    ) -> None:
        x, weight = torch.zeros(tokens, 16, dtype=dtype), torch.zeros(8, 16, dtype=dtype)
        sums = torch.zeros(square_sums or tokens, dtype=torch.float64)
        linears.add_norm(x, weight, torch.zeros(residual, dtype=dtype), weight[0, :8], 1e-5, sums)

    for tokens in (1, 65):
        with pytest.raises(ValueError, match=f"{tokens} rows"):
            add_norm(tokens, torch.bfloat16)
    with pytest.raises(ValueError, match="float16"):
        add_norm(4, torch.float16)
    with pytest.raises(ValueError, match="residual"):
        add_norm(4, torch.bfloat16, (4, 9))
    with pytest.raises(ValueError, match=r"square_sums must be \[4\]"):
        add_norm(4, torch.bfloat16, (4, 8), square_sums=3)


@pytest.mark.on_cpu("5", "20")
@pytest.mark.parametrize("tokens", [1, 5, 20])
def test_memory_around_the_inputs_does_not_affect_results(linears, device, tokens):
    """The rows before and after x and the weight are NaN."""
    call = make(Case(tokens, 21, 300, "silu", gated=True), device)
    expected = reference.linear(**call)
    for name in ("x", "weight"):
        rows, columns = call[name].shape
        wide = torch.full((rows + 8, columns), NAN, device=device)
        wide[4:-4] = call[name]
        call[name] = wide[4:-4]
    assert_close(linears.linear(**call), expected)


def test_rows_are_independent(linears, device):
    call = make(Case(8, 40, 256), device)
    together = linears.linear(**call)
    call["x"] = call["x"].clone()
    call["x"][3:] = NAN
    assert torch.equal(linears.linear(**call)[:3], together[:3])


def test_empty_inputs_have_empty_results(linears, device):
    assert linears.linear(**make(Case(0, 8, 64), device)).shape == (0, 8)


def test_fits_accepts_only_supported_inputs(linears):
    weight = torch.empty(64, 128, dtype=torch.bfloat16)
    assert linears.fits(1, weight)
    assert linears.fits(linears.MAX_TOKENS, weight)
    assert not linears.fits(linears.MAX_TOKENS + 1, weight)
    assert not linears.fits(1, weight.float())
    assert linears.fits(16, torch.empty(64, 80, dtype=torch.float16))
    assert not linears.fits(17, torch.empty(64, 80, dtype=torch.float16))
    assert not linears.fits(1, weight[:, :100])
    assert not linears.fits(1, weight[:, :64])


def test_unsupported_inputs_are_errors(linears):
    call = make(Case(2, 8, 64), torch.device("cpu"))
    with pytest.raises(ValueError, match="more than 64"):
        linears.linear(torch.ones(65, 64), call["weight"])
    with pytest.raises(ValueError, match="'tanh' is not one of"):
        linears.linear(**call | {"activation": "tanh"})
    with pytest.raises(ValueError, match="contiguous"):
        linears.linear(**call | {"weight": torch.ones(64, 8).T})


# Real sizes, compiled


@gpu
@needs_gpu
@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 9, 16, 17, 32, 33, 64])
@pytest.mark.parametrize(
    "case",
    [
        Case(0, 6144, 4096, dtype=torch.bfloat16),
        Case(0, 3072, 4096, dtype=torch.bfloat16),
        Case(0, 4096, 2048, dtype=torch.bfloat16),
        Case(0, 1024, 2048, dtype=torch.bfloat16),
        Case(0, 3072, 1024, "silu", gated=True, dtype=torch.bfloat16),
        Case(0, 4096, 14336, dtype=torch.bfloat16),
        Case(0, 14336, 4096, "silu", gated=True, dtype=torch.bfloat16),
        Case(0, 151936, 1024, dtype=torch.bfloat16),
        Case(0, 2304, 768, biased=True, dtype=torch.float16),
        Case(0, 3072, 768, "gelu_tanh", biased=True, dtype=torch.float16),
        Case(0, 768, 3072, biased=True, dtype=torch.float16),
        Case(0, 50257, 768, dtype=torch.float16),
    ],
    ids=str,
)
def test_real_sizes(linears, device, case, tokens):
    check(linears, Case(tokens, *list(case.__dict__.values())[1:]), device)


@gpu
@needs_gpu
@pytest.mark.parametrize("tokens", [1, 8, 64])
def test_kernels_of_a_captured_chain_wait_for_their_inputs(linears, device, tokens):
    """In a graph, each kernel starts before the one ahead of it has ended."""
    from toolkit.kernels.triton.norm import join

    torch.manual_seed(0)
    weights = (torch.randn(24, 1024, 1024, device=device) / 32).bfloat16()
    gates = (torch.randn(2048, 1024, device=device) / 32).bfloat16()
    weight = torch.ones(1024, device=device, dtype=torch.bfloat16)
    rms = reference.Norm(weight, None, 1e-5, False)
    first = torch.randn(tokens, 1024, device=device, dtype=torch.bfloat16)

    def chain(product) -> Tensor:
        x, residual = first.clone(), None
        for weight in weights:
            (x,), residual = join(x, residual, [rms])
            x = product(product(x, weight), weight)
            x = product(product(x, gates, None, "silu", True), weight)
        return x

    chain(linears.linear)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = chain(linears.linear)
    for _ in range(50):
        first.normal_()
        results = []
        for _ in range(2):
            actual.fill_(NAN)
            graph.replay()
            results.append(actual.clone())
        assert torch.equal(*results)
    expected = chain(reference.linear)
    assert (actual.double() - expected.double()).norm() / expected.double().norm() < 0.05
