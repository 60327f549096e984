"""The CUDA graphs of an engine: their number and cost, and the choice of one for a step."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from subprocess import run

import numpy as np
import pytest
import torch

from tests import checkpoints, engines
from toolkit import LLM
from toolkit.scheduler import SchedulerOutput
from toolkit.worker.graph_policy import GraphPolicy, least
from toolkit.worker.step_sizes import DECODE, MIXED, TOKEN_BUDGETS, VERIFY, sizes_below


def a_step(counts: list[int], computed: list[int]) -> SchedulerOutput:
    n = len(counts)
    return SchedulerOutput(
        step=0,
        rows=np.arange(n, dtype=np.int32),
        num_tokens=np.array(counts, np.int32),
        num_computed=np.array(computed, np.int32),
        samples=np.ones(n, np.bool_),
    )


@pytest.mark.parametrize(
    ("counts", "computed", "expected"),
    [
        ([1], [5], (1, 1)),
        ([1] * 3, [20_000] * 3, (4, 1)),
        ([1] * 97, [9] * 97, (100, 1)),
        ([1] * 101, [9] * 101, None),
        ([2], [9], (64, 64)),
        ([300, 1, 1], [0, 8000, 4], (320, 320)),
        ([300, 1], [0, 8192], None),  # graphs do not split a long context of one token
        ([300, 20], [20_000, 9], (320, 320)),  # long prompts are split
        ([1100], [0], (1280, 1280)),
        ([4607], [0], None),  # padding to 6144 would cost too much
        ([4608], [0], (6144, 6144)),
        ([8193], [0], None),
    ],
    ids=str,
)
def test_a_step_uses_the_smallest_graph_that_fits(counts, computed, expected):
    step = a_step(counts, computed)
    shape = GraphPolicy(100, 8192, 32768).shape_for(step)
    assert (shape and (shape.num_tokens, shape.max_query_len)) == expected
    assert GraphPolicy(100, 8192, 32768, captures=False).shape_for(step) is None


@pytest.mark.parametrize(
    ("limits", "most_graphs", "most_decode", "most_mixed"),
    [
        ((256, 8192, 32768), 56, 256, 8192),  # the defaults of a GPU
        ((1, 8192, 1000), 13, 1, 1024),  # no step has more than 1000 tokens
        ((1, 1, 8), 1, 1, 0),
        ((5, 100, 40), 6, 5, 64),
        ((1500, 1400, 1000), 82, 1400, 1280),
        ((1024, 16384, 4096), 81, 1024, 8192),
        ((4096, 8192, 131072), 129, 4096, 8192),
    ],
    ids=str,
)
def test_number_of_graphs_is_bounded(limits, most_graphs, most_decode, most_mixed):
    policy = GraphPolicy(*limits)
    shapes = policy.shapes
    assert len(shapes) == len(set(shapes)) <= most_graphs
    assert max(s.num_tokens for s in shapes if s.max_query_len == 1) == most_decode
    assert max((s.num_tokens for s in shapes if s.max_query_len > 1), default=0) == most_mixed
    assert [s.num_tokens for s in shapes] == sorted((s.num_tokens for s in shapes), reverse=True)
    assert all(s.num_reqs <= min(limits[0], s.num_tokens) for s in shapes)
    assert all(s.max_seq_len == limits[2] for s in shapes)


@pytest.mark.parametrize(
    ("table", "first", "few", "share"),
    [
        (DECODE, [1, 2, 4, 8, 16], 8, 1 / 8),
        (VERIFY, [1, 2, 4, 8, 12], 8, 1 / 2),
        (MIXED, [64, 128, 192, 256, 320], 64, 1 / 2),
    ],
    ids=["decode", "verify", "mixed"],
)
def test_sizes_bound_the_padding(table, first, few, share):
    sizes = sizes_below(2**13 + 1, table)
    assert list(sizes[:5]) == first
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == 2**13
    for wanted in range(sizes[0], sizes[-1] + 1):
        assert least(sizes, wanted) - wanted < max(few, share * wanted)
    assert sizes_below(sizes[5], table) == sizes[:5]
    assert sizes_below(sizes[5] + 1, table) == sizes[:6]


def test_largest_step_of_a_gpu_has_a_graph():
    assert sizes_below(TOKEN_BUDGETS["cuda"] + 1, MIXED)[-1] == TOKEN_BUDGETS["cuda"]


@pytest.mark.parametrize("limits", [(256, 8192, 32768), (3, 500, 100), (1500, 1400, 1000)], ids=str)
def test_every_graph_is_used(limits):
    policy = GraphPolicy(*limits)
    most = min(limits[1], limits[0] * limits[2])
    used = {policy.shape_for(a_step([1] * n, [0] * n)) for n in range(1, policy.most_requests + 1)}
    used |= {policy.shape_for(a_step([n], [0])) for n in range(2, most + 1)}
    assert used - {None} == set(policy.shapes)
    assert GraphPolicy(*limits, captures=False).shapes == []


def test_graphs_have_twins_for_adapters():
    plain, both = GraphPolicy(100, 8192, 32768), GraphPolicy(100, 8192, 32768, adapts=True)
    assert [shape for shape in both.shapes if not shape.is_adapted] == plain.shapes
    twins = {replace(shape, is_adapted=False) for shape in both.shapes if shape.is_adapted}
    assert twins == set(plain.shapes)
    for step in (a_step([1] * 3, [9] * 3), a_step([300, 1], [0, 5])):
        assert both.shape_for(step) == plain.shape_for(step)
        assert both.shape_for(step, is_adapted=True) == replace(
            plain.shape_for(step), is_adapted=True
        )


def test_policy_needs_no_torch():
    code = "import sys, toolkit.worker.graph_policy; sys.exit('torch' in sys.modules)"
    assert run([sys.executable, "-c", code], check=False).returncode == 0


SIZES = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8, "head_dim": 128}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 4096}
SECONDS_PER_GRAPH = 0.1
MIB_PER_GRAPH = 4
POOL_MIB = 600
"""Activations of the largest step, 8192 tokens. All graphs share them."""


@pytest.mark.gpu
@pytest.mark.alone
def test_graphs_cost_little_time_and_memory(tmp_path):
    checkpoints.save_config("Qwen3", SIZES | HEADS | {"max_position_embeddings": 32768}, tmp_path)
    llm = LLM(str(tmp_path), load_format="dummy", dtype="bfloat16", gpu_memory_utilization=0.3)
    worker = engines.worker(llm)
    runner, shapes = worker.runner, worker.runner.policy.shapes
    with worker.on_stream(), torch.inference_mode():
        runner.close()
        runner._pool = None
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, began = torch.cuda.mem_get_info()[0], time.perf_counter()
        runner.capture(shapes)
        seconds = time.perf_counter() - began
        mib = (free - torch.cuda.mem_get_info()[0]) / 2**20
    llm.shutdown()
    print(f"{len(shapes)} graphs: {seconds:.1f} s, {mib:.0f} MiB")
    assert len(shapes) == 56
    assert seconds < SECONDS_PER_GRAPH * len(shapes)
    assert mib < POOL_MIB + MIB_PER_GRAPH * len(shapes)


@pytest.mark.parametrize("limits", [(1, 64, 100), (5, 64, 200), (64, 320, 4096), (256, 8192, 9000)])
def test_steps_with_drafts_fit_their_graphs(limits):
    """Prompts may be shorter than the number of drafts that a graph has room for."""
    policy, rng = GraphPolicy(*limits, most_drafts=4), np.random.default_rng(0)
    num_verifying = 0
    for _ in range(300):
        n = int(rng.integers(1, policy.most_requests + 1))
        room = min(policy.most_step_drafts // n, 4)
        drafts = rng.integers(0, room + 1, n).astype(np.int32)
        own = np.where(rng.random(n) < rng.choice([0.0, 0.1]), rng.integers(1, 60, n), 1)
        step = a_step((own + drafts).tolist(), [70] * n)
        step.num_drafts = drafts if drafts.any() else np.empty(0, np.int32)
        shape = policy.shape_for(step)
        if step.total_tokens > policy.max_num_tokens or shape is None:
            continue
        assert shape in policy.shapes
        num_points = n + int(drafts.sum())
        assert shape.num_tokens >= step.total_tokens
        assert shape.num_reqs >= n
        assert shape.num_points >= num_points
        assert shape.max_query_len >= step.num_tokens.max()
        assert not shape.samples_all or num_points == step.total_tokens
        num_verifying += shape.verifies
    assert num_verifying > 20
    with_drafts = [shape for shape in policy.shapes if shape.num_drafts]
    assert all(shape.num_points <= limits[0] + policy.most_step_drafts for shape in with_drafts)
