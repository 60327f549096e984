"""The end of products, shared by bf16 and int4 weights: norm, gate and LoRA delta."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.combinations import pairwise

NAN = float("nan")
EPS = 1e-2
RANK, SLOTS = 16, 3
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # relative, in norm


@dataclass(frozen=True)
class Case:
    format: str  # of the weight
    tokens: int = 7
    size: int = 40
    in_features: int = 512
    activation: str | None = None
    gated: bool = False
    biased: bool = True
    unscaled: bool = False  # x is not divided by its root mean square yet
    normed: bool = False  # a residual sum and a norm follow
    slots: tuple[int, ...] | None = None  # adapter of token i: slots[i % len]; None: no delta
    parts: int = 1  # of the weight
    dtype: torch.dtype = torch.float32


@pytest.fixture(scope="session")
def kernels(triton) -> SimpleNamespace:
    from tests.kernels.products import plain
    from toolkit.kernels.triton import ahead
    from toolkit.kernels.triton.products import epilogue, grouped, grouped_layout, matmul

    return SimpleNamespace(
        ahead=ahead,
        grouped=grouped,
        grouped_layout=grouped_layout,
        matmul=matmul,
        epilogue=epilogue,
        plain=plain,
    )


def make_delta(kernels, x: Tensor, num_rows: int, slots: tuple[int, ...], parts: int = 1):
    """Return the delta of random adapters. Tokens without one have NaN as their x Aᵀ.

    The adapter of slot i has i + 1 blocks of ranks."""
    tokens, device = len(x), x.device
    slot = [slots[i % len(slots)] for i in range(tokens)]
    found = sorted({one for one in slot if one >= 0})[::-1]
    rank = RANK * max(1, *(one + 1 for one in slots))
    low = torch.randn(tokens, parts * rank, device=device).to(x.dtype)
    up = (torch.randn(SLOTS, num_rows, rank, device=device) / rank**0.5).to(x.dtype)
    for token, one in enumerate(slot):
        if one < 0:
            low[token] = NAN
        else:  # the ranks that its adapter lacks are not read
            low[token].view(parts, rank)[:, (one + 1) * RANK :] = NAN
            up[one, :, (one + 1) * RANK :] = NAN

    def ints(values) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return kernels.epilogue.Delta(
        low,
        up,
        ints([one + 1 for one in range(SLOTS)]),
        ints([row * parts // num_rows for row in range(num_rows)]),
        ints([found.index(one) if one >= 0 else -1 for one in slot]),
        ints([len(found), rank // RANK, *found, *[99] * (SLOTS - len(found))][: 2 + SLOTS]),
    )


def add_delta(y: Tensor, delta) -> None:
    """Add what adapters add to a product, in fp64, token by token."""
    for token, place in enumerate(delta.places.tolist()):
        if place >= 0:
            slot = int(delta.used[2 + place])
            ranks = int(delta.blocks[slot]) * RANK
            low = delta.low[token].double().view(-1, delta.rank)[delta.parts.long(), :ranks]
            y[token] += (delta.up[slot, :, :ranks].double() * low).sum(1)


def random_int4(kernels, rows: int, columns: int, device: torch.device):
    """Return a random weight in groups of 128 columns, with offsets."""
    values = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=device)
    scales = (torch.rand(rows, columns // 128, device=device) + 0.5) / (5 * columns**0.5)
    offsets = -scales * torch.randint(5, 11, scales.shape, device=device)
    with torch.device(device):
        weight = kernels.grouped_layout.empty((rows, columns), 4, 128, torch.float16, torch.float32)
    kernels.grouped_layout.arrange(values, scales.half(), offsets, 128, weight)
    return weight


def make(kernels, case: Case, device: torch.device) -> dict[str, object]:
    """Return the arguments of `run` and `expected`."""
    torch.manual_seed(0)
    num_rows = case.size * (2 if case.gated else 1)
    x = torch.randn(case.tokens, case.in_features, device=device).to(case.dtype)
    norm = None
    if case.format == "int4":
        weight = random_int4(kernels, num_rows, case.in_features, device)
    else:
        weight = torch.randn(num_rows, case.in_features, device=device) / case.in_features**0.5
        weight = weight.to(case.dtype)
    if case.normed:
        norm = kernels.epilogue.Norm(
            torch.randn(case.tokens, case.size, device=device).to(case.dtype),
            (torch.rand(case.size, device=device) + 0.5).to(case.dtype),
            EPS,
            torch.zeros(case.tokens, dtype=torch.float64, device=device),
        )
    if case.unscaled:
        sums = torch.rand(case.tokens, dtype=torch.float64, device=device) * case.in_features
        x = kernels.matmul.Unscaled(x, sums, EPS)
    return {
        "x": x,
        "weight": weight,
        "bias": torch.randn(num_rows, device=device).to(case.dtype) if case.biased else None,
        "norm": norm,
        "delta": None
        if case.slots is None
        else make_delta(kernels, x.x if case.unscaled else x, num_rows, case.slots, case.parts),
    }


def run(kernels, case: Case, call: dict, tile=None) -> Tensor:
    """Return the product, before the division by the norm's root mean square."""
    x = call["x"].x if case.unscaled else call["x"]
    out = torch.full((case.tokens, case.size), NAN, dtype=x.dtype, device=x.device)
    ending = case.activation, case.gated, out
    if case.format == "int4":
        weight, bias, delta = call["weight"], call["bias"], call["delta"]
        if case.normed:
            return kernels.grouped.add_norm(x, weight, *call["norm"], bias, delta=delta).x
        return kernels.grouped.linear(call["x"], weight, bias, *ending, delta=delta)
    if case.normed:
        return kernels.matmul.add_norm(
            x, call["weight"], call["bias"], call["norm"], tile, call["delta"]
        ).x
    return kernels.matmul.matmul(
        call["x"], call["weight"], None, call["bias"], *ending, tile, call["delta"]
    )


def expected(kernels, case: Case, call: dict) -> tuple[Tensor, Tensor | None]:
    """Return (what `run` returns, the residual sum) in fp64, token by token."""
    x = call["x"].x if case.unscaled else call["x"]
    weight = call["weight"]
    if case.format == "int4":
        weight = kernels.grouped_layout.expand(weight, torch.float32)
    y = F.linear(x.double(), weight.double())
    if call["delta"] is not None:
        add_delta(y, call["delta"])
    if case.unscaled:
        y *= torch.rsqrt(call["x"].square_sums / case.in_features + EPS)[:, None]
    if call["bias"] is not None:
        y += call["bias"].double()
    if case.gated:
        y, up = y.chunk(2, dim=1)
    if case.activation:
        y = {"silu": F.silu, "gelu": F.gelu}[case.activation](y)
    if case.gated:
        y = y * up
    if call["norm"] is None:
        return y, None
    total = (y + call["norm"].residual.double()).to(x.dtype)
    return total.double() * call["norm"].weight.double(), total


def check(kernels, device, case: Case, tile=None) -> None:
    call = make(kernels, case, device)
    result, total = expected(kernels, case, call)
    tolerance = TOLERANCE[case.dtype]
    out = run(kernels, case, call, tile)
    assert out.dtype == case.dtype
    assert (out.double() - result).norm() < tolerance * result.norm()  # NaN fails too
    if total is not None:
        norm = call["norm"]
        assert (norm.residual.double() - total).norm() < tolerance * total.double().norm()
        squares = norm.residual.double().square().sum(1)
        torch.testing.assert_close(norm.square_sums, squares, rtol=1e-5, atol=0)


ENDS = [
    {},
    {"activation": "gelu"},
    {"activation": "silu", "gated": True},
    {"activation": "silu", "gated": True, "unscaled": True},
    {"unscaled": True, "biased": False},
    {"normed": True},
    {"normed": True, "biased": False},
]
SLOT_CASES = [None, (-1,), (2,), (0, -1, 2, 2, 1)]


@pytest.mark.on_cpu(
    "('plain', torch.float32)-{}-None-1",
    "('int4', torch.bfloat16)-{'activation': 'silu', 'gated': True}-(-1,)-1",
    "('plain', torch.float32)-{'unscaled': True, 'biased': False}-None-1",
    "('plain', torch.bfloat16)-{'activation': 'silu', 'gated': True, 'unscaled': True}-None-2",
    "('plain', torch.bfloat16)-{'normed': True}-(-1,)-2",
    "('int4', torch.bfloat16)-{'normed': True, 'biased': False}-(2,)-3",
    "('plain', torch.float32)-{'activation': 'gelu'}-(0, -1, 2, 2, 1)-1",
)
@pytest.mark.parametrize(
    ("weight", "end", "slots", "parts"),
    pairwise(
        [("plain", torch.float32), ("plain", torch.bfloat16), ("int4", torch.bfloat16)],
        ENDS,
        SLOT_CASES,
        [1, 2, 3],
    ),
    ids=str,
)
def test_formats_share_every_end(kernels, device, weight, end, slots, parts):
    format, dtype = weight
    check(kernels, device, Case(format, slots=slots, parts=parts, dtype=dtype, **end))


@pytest.mark.on_cpu(
    "(16, 2, 1, 1)-5-{'activation': 'silu', 'gated': True}",
    "(64, 2, 1, 2)-5-{'normed': True}",
    "(16, 2, 2, 2)-50-{'normed': True}",
    "(8, 2, 4, 1)-20-{'activation': 'silu', 'gated': True}",
)
@pytest.mark.parametrize(
    ("tile", "tokens", "end"),
    pairwise(
        [(16, 2, 1, 1), (64, 2, 1, 2), (8, 2, 4, 1), (16, 2, 2, 2)],
        [5, 20, 50],
        [{"activation": "silu", "gated": True}, {"normed": True}],
    ),
    ids=str,
)
def test_deltas_after_every_kind_of_tile(kernels, device, tile, tokens, end):
    case = Case("plain", tokens, 70, 600, slots=(0, -1, 2), **end)
    check(kernels, device, case, kernels.matmul.Tile(*tile))


# Cost, on a GPU


HIDDEN, INNER, QKV = 4096, 14336, 6144  # of Llama-3.1-8B
SHAPES = [(QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER)]
TOKENS = [1, 8, 16, 32, 64]
LAYERS = 3
ROUNDS, REPLAYS = 40, 4
CHAINS = {
    "minimal": ("minimal", None),
    "shared": ("shared", None),
    "bf16": ("bf16", None),
    "bf16, unused": ("bf16", (-1,)),
    "bf16, one adapter": ("bf16", (2,)),
    "bf16, three adapters": ("bf16", (0, 1, 2)),
    "int4": ("int4", None),
    "int4, unused": ("int4", (-1,)),
    "int4, one adapter": ("int4", (2,)),
}
"""(product, slots of the tokens) of each chain."""


class Chain:
    """The products of a few layers, with the norms between them, in a graph."""

    def __init__(self, kernels, product, weights: list[list], tokens: int, slots) -> None:
        first = weights[0][0]
        device = (first if isinstance(first, torch.Tensor) else first.values).device
        dtype, norms = torch.bfloat16, 2 * LAYERS
        self._kernels, self._product, self._weights = kernels, product, weights
        self._x = torch.randn(tokens, HIDDEN, device=device).to(dtype)
        self._residual = torch.randn(tokens, HIDDEN, device=device).to(dtype)
        self._norm = torch.rand(HIDDEN, device=device).to(dtype)
        even = tokens + tokens % 2  # so that each row is aligned
        self._sums = torch.zeros(1 + norms, even, dtype=torch.float64, device=device)
        self._outs = [
            torch.empty(tokens, size, dtype=dtype, device=device)
            for size in (QKV, HIDDEN, INNER, HIDDEN)
        ]
        self._deltas = [
            None if slots is None else make_delta(kernels, self._x, rows, slots, parts)
            for (rows, _), parts in zip(SHAPES, (3, 1, 2, 1), strict=True)
        ]

    def launch(self) -> None:
        """Run the layers. Attention is left out: its output is as long as the hidden state."""
        unscaled, (qkv, out, up, down) = self._kernels.matmul.Unscaled, self._outs
        self._sums.fill_(1.0)
        sums = [row[: len(self._x)] for row in self._sums]
        x = unscaled(self._x, sums[0], EPS)
        for layer, weights in enumerate(self._weights):
            first, second = (
                self._kernels.epilogue.Norm(self._residual, self._norm, EPS, sums[2 * layer + i])
                for i in (1, 2)
            )
            steps = list(zip(weights, self._deltas, strict=True))
            self._product(x, *steps[0], None, False, qkv, None)
            self._product(self._x, *steps[1], None, False, out, first)
            self._product(unscaled(out, first.square_sums, EPS), *steps[2], "silu", True, up, None)
            self._product(up, *steps[3], None, False, down, second)
            x = unscaled(down, second.square_sums, EPS)

    def capture(self) -> None:
        self.launch()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.launch()


def products(kernels) -> dict[str, object]:
    """Return functions of (x, weight, delta, activation, gated, out, norm) by name.

    `minimal` and `shared` have the same tiles, which the former supports."""
    matmul, plain, grouped = kernels.matmul, kernels.plain, kernels.grouped

    def tile(weight):
        is_wide = len(weight) > 64 * matmul.MULTIPROCESSORS
        return matmul.Tile(128, stages=4) if is_wide else matmul.Tile(64, stages=6)

    def minimal(x, weight, delta, *end) -> None:
        plain.product(x, weight, *end, tile(weight))

    def shared(x, weight, delta, *end) -> None:
        matmul._run(x, weight, None, None, *end, tile(weight), delta)

    def best(x, weight, delta, *end) -> None:
        matmul._run(x, weight, None, None, *end, None, delta)

    def of_int4(x, weight, delta, *end) -> None:
        grouped._run(x, weight, None, *end, None, delta)

    return {"minimal": minimal, "shared": shared, "bf16": best, "int4": of_int4}


@pytest.fixture(scope="module")
def chains(kernels, device) -> dict[int, dict[str, Chain]]:
    """Return captured chains by number of tokens and name, compiled side by side."""
    torch.manual_seed(0)
    bf16, int4 = [], []
    for _ in range(LAYERS):
        wide = [torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in SHAPES]
        bf16.append([weight / weight.shape[1] ** 0.5 for weight in wide])
        int4.append([random_int4(kernels, *shape, device) for shape in SHAPES])
    run = products(kernels)
    made = {
        tokens: {
            name: Chain(kernels, run[kind], int4 if kind == "int4" else bf16, tokens, slots)
            for name, (kind, slots) in CHAINS.items()
        }
        for tokens in TOKENS
    }
    every = [chain for by_name in made.values() for chain in by_name.values()]
    with kernels.ahead.compiled_side_by_side(16):
        for chain in every:
            chain.launch()
    for chain in every:
        chain.capture()
    return made


def times(chains: dict[str, Chain]) -> dict[str, float]:
    """Return the time of each chain in us per layer: the median of rounds that replay them all."""
    rounds = []
    for _ in range(ROUNDS):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(chains) + 1)]
        marks[0].record()
        for chain, mark in zip(chains.values(), marks[1:], strict=True):
            for _ in range(REPLAYS):
                chain.graph.replay()
            mark.record()
        torch.cuda.synchronize()
        rounds.append([begin.elapsed_time(end) for begin, end in itertools.pairwise(marks)])
    medians = torch.tensor(rounds[3:]).median(0).values * 1000 / REPLAYS / LAYERS
    return dict(zip(chains, medians.tolist(), strict=True))


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("tokens", TOKENS)
def test_absent_deltas_cost_at_most_two_percent(chains, tokens, capsys):
    """An end that can add deltas, without them: not compiled in, or used by no token.

    Steps without adapters have kernels that were compiled without deltas. Unused ones cost more, in
    steps in which other requests have adapters: 3 % with bf16 and up to 31 % with int4 weights of
    one row, on an H100."""
    found = times(chains[tokens])
    ratios = {
        "compiled out": found["shared"] / found["minimal"],
        "bf16, unused": found["bf16, unused"] / found["bf16"],
        "int4, unused": found["int4, unused"] / found["int4"],
    }
    with capsys.disabled():
        print(f"\n{tokens} rows, us per layer:", *(f"{k} {v:.1f};" for k, v in found.items()))
        print("ratios:", *(f"{name} {ratio:.3f};" for name, ratio in ratios.items()))
    assert ratios["compiled out"] <= 1.02
    assert ratios["bf16, unused"] <= 1.05
