"""The calls that `tools.bench.kernels` and `experts` time run. Other tests check their results."""

from __future__ import annotations

import pytest
import torch

from toolkit.kernels.reference import Routing

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def calls(triton):
    from tools.bench import kernel_calls

    return kernel_calls


@pytest.fixture
def make(calls, device):
    return calls.TensorFactory(device)


def test_rows_run_and_count_their_bytes(calls, make, monkeypatch):
    monkeypatch.setattr(calls, "COLD_BYTES", 0)
    shape = calls.LayerShape(hidden=32, inner=48, heads=4, kv_heads=2, head_size=16)
    rows = [
        *calls.layer_rows(5, make, shape),
        *calls.logits_rows(3, 320, 40, make),
        *calls.state_rows(4, 3, 20, make),
    ]
    for row in rows:
        assert len(row.calls) in (1, 2)
        assert row.num_bytes > 0
        for call in row.calls:
            call()
    assert len({row.name for row in rows}) == len(rows) == 14


def test_layer_norms_move_four_rows_per_token(calls, make, monkeypatch):
    """The kernels read x and residual, and write the sum and the norm."""
    monkeypatch.setattr(calls, "COLD_BYTES", 0)
    shape = calls.LayerShape(hidden=32, inner=48, heads=4, kv_heads=2, head_size=16)
    rows = {row.name: row.num_bytes for row in calls.layer_rows(5, make, shape)}
    assert rows["add and layer norm"] == 4 * 5 * 32 * 2
    assert rows["GELU"] == 2 * 5 * 48 * 2


@pytest.mark.parametrize("gated", [False, True])
def test_fp8_products_run(calls, make, monkeypatch, gated):
    monkeypatch.setattr(calls, "COLD_BYTES", 0)
    for call in calls.fp8_products(3, 32, 128, gated, make):
        call()
    assert make.random(2, 2).dtype == torch.bfloat16


@pytest.mark.on_cpu("lens0-0", "lens0-9", "lens0-30", "lens1-1", "lens2-4")
@pytest.mark.parametrize("window", [0, 1, 4, 9, 30])
@pytest.mark.parametrize("lens", [((1, 9), (1, 1)), ((9, 9),), ((3, 10), (1, 5), (2, 2))])
def test_attention_counts_pairs_and_keys_inside_the_window(calls, window, lens):
    from tools.bench.kernels import AttentionCase

    case = AttentionCase("", lens, heads=6, kv_heads=2, head_size=16, sliding_window=window)
    pairs = [
        (request, query, key)
        for request, (queries, context) in enumerate(lens)
        for query in range(context - queries, context)
        for key in range(query + 1)
        if not window or key > query - window
    ]
    keys = {(request, key) for request, _, key in pairs}
    assert case.flops == 2 * 2 * len(pairs) * 6 * 16
    assert case.kv_bytes == 2 * len(keys) * 2 * 16 * 2


@pytest.fixture
def expert_calls(triton, monkeypatch):
    from tools.bench import experts

    monkeypatch.setattr(experts, "COLD_BYTES", 0)
    return experts


@pytest.mark.on_cpu("20")
@pytest.mark.parametrize("tokens", [1, 20])
def test_layers_of_experts_equal_the_librarys(expert_calls, device, tokens):
    shape = expert_calls.Shape("", hidden=32, experts=6, chosen=2, size=16)
    layers = [expert_calls.Weights.random(shape, "bf16", device) for _ in range(2)]
    calls, how = expert_calls.steps(shape, tokens, layers), Routing(2)
    assert [step.weights for step in calls] == layers
    # Without equal logits, of which the library may choose any.
    ranks = [torch.rand(tokens, 6, device=device).argsort(1) / 2 for _ in calls]
    calls = [step._replace(logits=rank) for step, rank in zip(calls, ranks, strict=True)]
    for step in calls:
        ours, library = expert_calls.ours(step, how), expert_calls.library(step, how)
        assert (ours - library).float().norm() < 0.02 * library.float().norm()
    touched = [len(step.logits.topk(2).indices.unique()) for step in calls]
    assert expert_calls.num_touched(calls, how) == sum(touched) / 2


def test_work_of_experts_is_counted(expert_calls):
    shape = expert_calls.Shape("", hidden=32, experts=6, chosen=2, size=16)
    assert shape.elements == 2 * 16 * 32 + 32 * 16
    assert shape.flops(5) == 5 * 2 * 2 * shape.elements


@pytest.mark.on_cpu("64-int4")
@pytest.mark.parametrize(
    ("tokens", "kind"), [(8, "fp8"), (64, "int4"), (64, "fp8-blocks"), (2048, "fp8")]
)
def test_tiles_that_are_tried_differ(expert_calls, device, tokens, kind):
    sizes = (32, 16) if kind == "fp8" else (128, 64)
    shape = expert_calls.Shape("", hidden=sizes[0], experts=6, chosen=2, size=sizes[1])
    weights = expert_calls.Weights.random(shape, kind, device)
    tried = list(expert_calls.candidates(tokens, 2, weights))
    assert len(set(tried)) == len(tried) > 5
    assert all(tiles.up.tokens == tiles.down.tokens for tiles in tried)
    step = expert_calls.steps(shape, 40, [weights])[0]
    expected = expert_calls.ours(step, Routing(2))
    for tiles in tried[1:4]:
        y = expert_calls.ours(step, Routing(2), tiles)
        assert (y - expected).float().norm() < 0.06 * expected.float().norm()
