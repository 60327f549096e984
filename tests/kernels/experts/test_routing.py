"""The choice of experts and their blocks: against plain Python, and a reference."""

from __future__ import annotations

import itertools
import math
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.combinations import pairwise
from toolkit.kernels import reference
from toolkit.kernels.reference import Routing

NAN = float("nan")
gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.fixture(scope="session")
def kernels(triton) -> ModuleType:
    from toolkit.kernels.triton.experts import routing

    return routing


def by_hand(
    logits: list[float], routing: Routing, bias: list[float] | None
) -> tuple[list[int], list[float]]:
    """Return the experts of one token and their weights, by sorting Python numbers."""
    number = len(logits)
    if routing.scores == "softmax":
        powers = [math.exp(one - max(logits)) for one in logits]
        scores = [one / sum(powers) for one in powers]
    else:
        scores = [1 / (1 + math.exp(-one)) for one in logits]
    rank = scores if bias is None else [a + b for a, b in zip(scores, bias, strict=True)]
    size = number // routing.num_groups
    best = [
        sum(sorted(rank[begin : begin + size])[-1 if bias is None else -2 :])
        for begin in range(0, number, size)
    ]
    groups = sorted(range(len(best)), key=lambda group: (-best[group], group))
    allowed = groups[: routing.num_chosen_groups]
    order = sorted(range(number), key=lambda expert: (-rank[expert], expert))
    ids = [expert for expert in order if expert // size in allowed][: routing.num_chosen]
    weights = [scores[expert] for expert in ids]
    total = sum(weights) if routing.renormalize else 1
    return ids, [one / total * routing.scale for one in weights]


ROUTINGS = [
    (Routing(8), 128),
    (Routing(2, renormalize=True), 8),
    (Routing(1), 1),
    (Routing(4, "sigmoid", renormalize=True, scale=2.5), 24),
    (Routing(6, num_groups=8, num_chosen_groups=3, scale=16.0), 40),  # as DeepSeek-V2
    (Routing(8, "sigmoid", True, 8, 4, 2.5), 64),  # as DeepSeek-V3
    (Routing(3, "sigmoid", False, 3, 2, 1.0), 18),
    (Routing(9, num_groups=8, num_chosen_groups=3), 40),  # more than a group and its padding
    (Routing(16), 512),
]


def check(found: tuple[Tensor, Tensor], expected: tuple[list, list]) -> None:
    ids, weights = found
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    assert ids.tolist() == expected[0]
    torch.testing.assert_close(weights.cpu(), torch.tensor(expected[1]), rtol=1e-5, atol=1e-7)


def routed_by_hand(logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[list, list]:
    added = None if bias is None else bias.tolist()
    rows = [by_hand(row, routing, added) for row in logits.tolist()]
    return [ids for ids, _ in rows], [weights for _, weights in rows]


def mixed_by_hand(logits: list[float], num_chosen: int) -> tuple[list[int], list[float]]:
    """Return the experts of one token and their weights, with the scores of SparseMixer."""
    ids: list[int] = []
    weights = []
    for _ in range(num_chosen):
        left = [one for one in range(len(logits)) if one not in ids]
        best = max(left, key=lambda expert: logits[expert])
        top = logits[best]
        near = [
            logits[one] for one in left if top - logits[one] <= 0.02 * max(abs(logits[one]), top)
        ]
        ids.append(best)
        weights.append(1 / sum(math.exp(one - top) for one in near))
    return ids, weights


def in_short(case: object) -> str:
    """Return a case's name in a test's."""
    if not (isinstance(case, tuple) and isinstance(case[0], Routing)):
        return str(case)
    how, size = case
    groups = f" in {how.num_groups} groups" if how.num_groups > 1 else ""
    return f"{how.scores} {how.num_chosen} of {size}{groups}"


@pytest.mark.on_cpu("dtype0-2", "dtype0-40", "dtype1-16")
@pytest.mark.parametrize("number", [2, 16, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparse_mixer(kernels, device, number, dtype):
    """Logits of several sizes and signs, near each other and equal."""
    torch.manual_seed(0)
    logits = torch.randn(24, number) * torch.logspace(-3, 1, 24)[:, None]
    logits[::3] += 4
    logits[1::3] -= 4
    logits[2], logits[3, ::2] = 0, 0
    logits = logits.to(dtype)
    rows = [mixed_by_hand(row, 2) for row in logits.tolist()]
    expected = [ids for ids, _ in rows], [weights for _, weights in rows]
    assert 0.1 < (torch.tensor(expected[1]) < 0.99).float().mean() < 0.9, "some are near"
    routing = Routing(2, "sparsemixer")
    check(reference.route(logits, routing), expected)
    check(kernels.route(logits.to(device), routing), expected)


@pytest.mark.on_cpu(
    "softmax 8 of 128-False",
    "softmax 2 of 8-True",
    "softmax 1 of 1-False",
    "sigmoid 4 of 24-False",
    "softmax 6 of 40 in 8 groups-False",
    "sigmoid 8 of 64 in 8 groups-False",
    "sigmoid 3 of 18 in 3 groups-False",
    "softmax 9 of 40 in 8 groups-False",
    "softmax 16 of 512-False",
)
@pytest.mark.parametrize("is_biased", [False, True])
@pytest.mark.parametrize("case", ROUTINGS, ids=in_short)
def test_experts_and_weights(kernels, device, case, is_biased):
    routing, number = case
    torch.manual_seed(0)
    logits = 2 * torch.randn(9, number)
    bias = 0.3 * torch.randn(number) if is_biased else None
    if is_biased and routing.num_groups > 1 and number == 40:
        bias -= 1  # all ranks of some groups are negative
    expected = routed_by_hand(logits, routing, bias)
    check(reference.route(logits, routing, bias), expected)
    moved = None if bias is None else bias.to(device)
    check(kernels.route(logits.to(device), routing, moved), expected)


@pytest.mark.on_cpu(
    "softmax 8 of 128-False-torch.float32",
    "softmax 2 of 8-False-torch.bfloat16",
    "softmax 1 of 1-False-torch.float32",
    "sigmoid 4 of 24-False-torch.float32",
    "softmax 6 of 40 in 8 groups-False-torch.float32",
    "sigmoid 8 of 64 in 8 groups-False-torch.float32",
    "sigmoid 3 of 18 in 3 groups-True-torch.bfloat16",
    "softmax 9 of 40 in 8 groups-False-torch.float32",
    "softmax 16 of 512-False-torch.float32",
)
@pytest.mark.parametrize(
    ("case", "is_biased", "dtype"),
    pairwise(ROUTINGS, [False, True], [torch.float32, torch.bfloat16]),
    ids=in_short,
)
def test_of_equal_scores_the_first_is_chosen(kernels, device, case, is_biased, dtype):
    """Logits have three values, and so have the biases: groups are equal too."""
    routing, number = case
    torch.manual_seed(1)
    logits = torch.randint(-1, 2, (9, number)).to(dtype)
    logits[0] = 0
    bias = torch.randint(-1, 2, (number,)) / 4 if is_biased else None
    expected = routed_by_hand(logits, routing, bias)
    check(reference.route(logits, routing, bias), expected)
    moved = None if bias is None else bias.to(device)
    check(kernels.route(logits.to(device), routing, moved), expected)


def test_factors_multiply_the_weights(kernels, device):
    torch.manual_seed(0)
    logits, factors, slots = torch.randn(7, 24), torch.randn(24), torch.arange(7) - 2
    routing = Routing(3, renormalize=True, scale=0.5)
    ids, weights = reference.route(logits, routing)
    expected = ids.masked_fill(slots[:, None] < 0, -1), weights * factors[ids]
    expected[1][:2] = 0
    arguments = [one.to(device) for one in (logits, slots, factors)]
    for module, (own, padded, by) in (
        (reference, (logits, slots, factors)),
        (kernels, arguments),
    ):
        found = module.route(own, routing, None, padded, by)
        torch.testing.assert_close(found[0].cpu(), expected[0])
        torch.testing.assert_close(found[1].cpu(), expected[1])


def test_padding_has_no_experts(kernels, device):
    torch.manual_seed(0)
    logits = torch.randn(5, 12)
    logits[3:] = NAN
    slots = torch.tensor([0, -1, 7, -1, -1])
    routing = Routing(3, renormalize=True)
    for route, place in ((reference.route, torch.device("cpu")), (kernels.route, device)):
        ids, weights = route(logits.to(place), routing, None, slots.to(place))
        assert ids[[1, 3, 4]].tolist() == [[-1] * 3] * 3
        assert weights[[1, 3, 4]].tolist() == [[0.0] * 3] * 3
        check((ids[[0, 2]], weights[[0, 2]]), routed_by_hand(logits[[0, 2]], routing, None))


@pytest.mark.on_cpu(
    "softmax 2 of 8", "sigmoid 4 of 24", "softmax 6 of 40 in 8 groups", "sparsemixer 2 of 16"
)
@pytest.mark.parametrize("case", [*ROUTINGS, (Routing(2, "sparsemixer"), 16)], ids=in_short)
def test_experts_differ_even_if_logits_are_nan(kernels, device, case):
    """Places in memory depend on them."""
    routing, number = case
    logits = torch.full((3, number), NAN, device=device)
    logits[1, ::2] = 1.0
    logits[2] = torch.inf
    bias = None if routing.scores == "sparsemixer" else torch.zeros(number, device=device)
    ids, _ = kernels.route(logits, routing, bias)
    assert ids.min() >= 0
    assert ids.max() < number
    assert all(len(set(row)) == routing.num_chosen for row in ids.tolist())


def test_impossible_routings_are_errors(kernels):
    logits = torch.zeros(2, 12)
    for routing, message in (
        (Routing(3, "tanh"), "not one of"),
        (Routing(17), "are more than 16"),
        (Routing(2, "sparsemixer", num_groups=2), "no groups"),
        (Routing(2, num_groups=5), "cannot be 5 groups"),
        (Routing(2, num_groups=2, num_chosen_groups=3), "cannot be 2 groups"),
        (Routing(4, num_groups=4, num_chosen_groups=1), "more than 1 groups have"),
        (Routing(13), "more than 1 groups have"),
    ):
        with pytest.raises(ValueError, match=message):
            kernels.route(logits, routing)
    with pytest.raises(ValueError, match="are more than 16 of 512"):
        kernels.route(torch.zeros(2, 513), Routing(2))
    with pytest.raises(ValueError, match="contiguous"):
        kernels.route(torch.zeros(12, 2).T, Routing(2))


def blocks_of(blocks, num_tokens: int) -> dict[int, list[list[int]]]:
    """Return the pairs of each block, by expert. Check that entries of an expert are adjacent."""
    table, pairs = blocks.table.tolist(), blocks.pairs.tolist()
    found: dict[int, list[list[int]]] = {}
    for place, (expert, first, number, count) in enumerate(table):
        if count == 0:
            assert not any(map(any, table[place:])), "no blocks follow the last one"
            break
        block = place - first
        assert 0 <= block < number == -(-count // blocks.size)
        assert len(found.setdefault(expert, [])) == block
        members = pairs[expert][:count]
        found[expert].append(members[block * blocks.size :][: blocks.size])
    assert list(found) == sorted(found)
    return found


@pytest.mark.on_cpu("1-(8, 2)-4", "5-(200, 1)-64", "700-(3, 3)-16", "40-(60, 4)-4")
@pytest.mark.parametrize(
    ("tokens", "shape", "size"),
    pairwise([1, 5, 40, 700], [(8, 2), (60, 4), (3, 3), (200, 1)], [4, 16, 64]),
    ids=str,
)
def test_blocks_have_each_pair_once(kernels, device, tokens, shape, size):
    """The second call finds the counters as the first left them."""
    number, chosen = shape
    torch.manual_seed(0)
    for skew in (0, 3):
        rank = torch.rand(tokens, number) + skew * torch.linspace(0, 1, number)
        ids = rank.argsort(1, descending=True)[:, :chosen].int()
        ids[torch.rand(ids.shape) < 0.2] = -1
        found = blocks_of(kernels.arrange(ids.to(device), number, size), tokens)
        expected = {
            expert: (ids.flatten() == expert).nonzero()[:, 0].tolist()
            for expert in ids.unique().tolist()
            if expert >= 0
        }
        assert {
            expert: sorted(itertools.chain(*each)) for expert, each in found.items()
        } == expected


@pytest.mark.parametrize("size", [4, 16])
def test_the_most_blocks_fit(kernels, device, size):
    """The table has as many entries as the worst routing needs: one pair more than full blocks."""
    ids = torch.tensor([0] * (size + 1) + [1] * (2 * size + 1) + [2], dtype=torch.int32)
    blocks = kernels.arrange(ids[:, None].to(device), 3, size)
    assert len(blocks.table) == 2 + 3 + 1
    found = blocks_of(blocks, len(ids))
    assert [len(found[expert]) for expert in range(3)] == [2, 3, 1]


def test_ids_of_no_token_have_no_blocks(kernels, device):
    ids = torch.full((6, 2), -1, dtype=torch.int32, device=device)
    assert blocks_of(kernels.arrange(ids, 4, 4), 6) == {}


@gpu
@needs_gpu
@pytest.mark.parametrize("tokens", [1, 64, 8192])
@pytest.mark.parametrize("case", ROUTINGS, ids=in_short)
def test_routes_of_many_tokens(kernels, device, case, tokens):
    routing, number = case
    torch.manual_seed(0)
    logits = (torch.randint(-400, 400, (tokens, number)) / 64).to(device)  # equal or far apart
    ids, weights = kernels.route(logits, routing)
    expected_ids, expected = reference.route(logits, routing)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)
    blocks = blocks_of(kernels.arrange(ids, number, 64), tokens)
    assert sum(len(pairs) for each in blocks.values() for pairs in each) == ids.numel()
