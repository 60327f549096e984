"""The state of rows and the runner are the same with each table of kernels."""

from __future__ import annotations

import contextlib
import random
from bisect import bisect_right

import numpy as np
import pytest
import torch

from tests import engines
from toolkit import LLM, SamplingParams
from toolkit.attention import (
    Attention,
    AttentionBatch,
    AttentionShape,
    GroupTable,
    HeadTransform,
)
from toolkit.attention.triton import TritonBackend
from toolkit.cache_group import CacheGroup, first_columns
from toolkit.kernels.table import CPUKernels, Kernels, TritonKernels
from toolkit.sampling.params import SamplingParams as Params
from toolkit.scheduler import NewRow, SchedulerOutput
from toolkit.sequence import SequenceSpec
from toolkit.worker.batch_state import BatchState
from toolkit.worker.graph_policy import StepShape
from toolkit.worker.startup.warm_up import WarmUp

ROWS, LENGTH, BLOCK = 7, 96, 4
GROUPS = (CacheGroup(blocks_per_page=2), CacheGroup(window=9))
PAGES = [BLOCK * group.blocks_per_page for group in GROUPS]
"""Tokens of a page, by group."""
COLUMNS = first_columns(GROUPS, BLOCK, LENGTH)


@pytest.fixture(params=[CPUKernels, TritonKernels])
def state(request: pytest.FixtureRequest, triton_runs: bool) -> BatchState:
    if request.param is TritonKernels and not triton_runs:
        pytest.skip("Triton was imported without its interpreter")
    return make_state(request.param())


def make_state(kernels: Kernels) -> BatchState:
    return BatchState(ROWS, LENGTH, BLOCK, torch.device("cpu"), 512, kernels, groups=GROUPS)


def random_steps(rng: random.Random, count: int) -> list[SchedulerOutput]:
    """Steps in which requests arrive, grow by some tokens at a time, and are replaced."""
    lengths: dict[int, int] = {}
    computed: dict[int, int] = {}
    steps = []
    for number in range(count):
        new_rows, new_blocks = [], []
        for row in rng.sample(range(ROWS), rng.randint(0, 2)):
            length = rng.randint(1, 60)
            tokens = [rng.randrange(1000) for _ in range(length)]
            pages = [[rng.randrange(500) for _ in range(-(-length // tokens))] for tokens in PAGES]
            params = Params(temperature=rng.random(), top_k=rng.randrange(9), seed=rng.randrange(9))
            seed = rng.getrandbits(63)
            new_rows.append(
                NewRow(
                    row=row,
                    spec=SequenceSpec(
                        prompt_token_ids=tokens, params=params, max_tokens=9, eos_token_ids=[]
                    ),
                    seed=-seed,
                    output_token_ids=[],
                    num_computed_tokens=0,
                    blocks=pages,
                )
            )
            lengths[row], computed[row] = length, 0
        rows = [row for row in lengths if computed[row] < LENGTH - 8 and rng.random() < 0.8]
        counts, starts = [], []
        for row in rows:
            missing = lengths[row] - computed[row]
            counts.append(min(missing, rng.randint(1, 30)) if missing else 1)
            starts.append(computed[row])
            for first, tokens in zip(COLUMNS[:-1], PAGES, strict=True):
                have, need = -(-lengths[row] // tokens), -(-(computed[row] + counts[-1]) // tokens)
                columns = range(first + have, first + need)
                new_blocks += [(row, column, rng.randrange(500)) for column in columns]
            computed[row] += counts[-1]
            lengths[row] = max(lengths[row], computed[row])
        at_end = [computed[row] == lengths[row] for row in rows]
        samples = np.array([all_known and rng.random() < 0.7 for all_known in at_end], np.bool_)
        sampling = [row for row, samples_it in zip(rows, samples, strict=True) if samples_it]
        newest = [(row, computed[row] - 1, rng.randrange(1000)) for row in sampling]
        steps.append(
            SchedulerOutput(
                step=number,
                rows=np.array(rows, np.int32),
                num_tokens=np.array(counts, np.int32),
                num_computed=np.array(starts, np.int32),
                samples=samples,
                new_rows=new_rows,
                new_blocks=np.array(new_blocks, np.int32).reshape(-1, 3),
                known_tokens=np.array(newest, np.int32).reshape(-1, 3),
            )
        )
    return steps


@pytest.mark.on_cpu("CPUKernels-1", "TritonKernels-1")
@pytest.mark.parametrize("seed", range(3))
def test_inputs_equal_those_of_the_reference(state, seed):
    rng = random.Random(seed)
    tokens = np.zeros((ROWS, LENGTH + 1), np.int64)
    blocks = np.zeros((len(GROUPS), ROWS, LENGTH // BLOCK), np.int64)

    def put(row: int, column: int, page: int) -> None:
        g = bisect_right(COLUMNS, column) - 1
        count = GROUPS[g].blocks_per_page
        first = (column - COLUMNS[g]) * count
        blocks[g, row, first : first + count] = page * count + np.arange(count)

    reference = make_state(Kernels())
    for step in random_steps(rng, 25):
        for new in step.new_rows:
            tokens[new.row, : len(new.token_ids)] = new.token_ids
            for first, pages in zip(COLUMNS[:-1], new.blocks, strict=True):
                for column, page in enumerate(pages, first):
                    put(new.row, column, page)
        for new_block in step.new_blocks.tolist():
            put(*new_block)
        for row, position, token in step.known_tokens:
            tokens[row, position] = token
        for one in (state, reference):
            one.apply(step)
            assert one.token_ids[:ROWS].tolist() == tokens.tolist()
            for table, own in zip(one.tables, blocks, strict=True):
                assert table[:ROWS].tolist() == own.tolist()
        assert torch.equal(state.sampling.ints, reference.sampling.ints)
        assert torch.equal(state.sampling.floats, reference.sampling.floats)
        assert state.sampling.windows.tolist() == state.sampling.host_windows.tolist()
        if not len(step.rows):
            continue
        n, total = len(step.rows), step.total_tokens
        padded = StepShape(total + rng.randint(0, 9), min(n + 2, ROWS), total, LENGTH)
        (inputs, batch), (expected, expected_batch) = (
            (found := one.expand(padded), found.batch)
            for one in (state, reference)
            if one.send(step) is None
        )
        assert torch.equal(inputs.token_ids, expected.token_ids)
        for name in ("positions", "query_start_loc", "seq_lens", "rows", "order"):
            assert torch.equal(getattr(batch, name), getattr(expected_batch, name)), name
        own = np.repeat(step.rows, step.num_tokens)
        positions = np.concatenate(
            [np.arange(a, a + c) for a, c in zip(step.num_computed, step.num_tokens, strict=True)]
        )
        assert inputs.token_ids[:total].tolist() == tokens[own, positions].tolist()
        for g, (_, found) in enumerate(batch.tables):
            slots = blocks[g, own, positions // BLOCK] * BLOCK + positions % BLOCK
            assert found[:total].tolist() == slots.tolist()
            assert (found[total:] == -1).all()
        assert (batch.seq_lens[n:] == 0).all()
        in_order = batch.seq_lens[batch.order].tolist()
        assert in_order == sorted(in_order, reverse=True)
        wanted = np.where(step.samples, step.num_computed + step.num_tokens, -1)
        assert inputs.sample_positions[:n].tolist() == wanted.tolist()
        assert (inputs.sample_positions[n:] == -1).all()


PARAMS = {
    "greedy": {"temperature": 0.0},
    "log-probabilities": {"temperature": 0.0, "logprobs": 3},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "window": {"temperature": 0.0, "repetition_penalty": 1.3, "penalty_window": 4},
    "biases": {"temperature": 0.0, "logit_bias": {5: 4.0, 9: -3.0}},
    "forbidden": {
        "temperature": 0.0,
        "allowed_token_ids": [3, 8, 70],
        "bad_words_token_ids": [[3, 3], [8, 8], [70, 70]],
    },
    "seeded": {"temperature": 0.8, "seed": 11},
    "seeded top-k": {"temperature": 0.8, "seed": 12, "top_k": 5},
}


@pytest.mark.on_cpu("qwen3")
@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_the_gpu_runner_samples_as_the_cpu_runner(checkpoint, triton_runs, monkeypatch, name):
    """Both use the same model and attention; inputs, sampling and state differ."""
    if not triton_runs:
        pytest.skip("Triton was imported without its interpreter")
    rng = random.Random(name)
    prompts = [[rng.randrange(90) for _ in range(n)] for n in (3, 17, 30, 9, 1, 8, 21, 12)]
    params = [SamplingParams(max_tokens=6, ignore_eos=True, **p) for p in PARAMS.values()]

    def answers() -> list:
        settings = {"max_num_seqs": 5, "block_size": 4, "max_num_batched_tokens": 40}
        llm = LLM(str(checkpoint(name)), device="cpu", attention_backend="torch", **settings)
        kernels = type(engines.kernels(llm))
        found = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        llm.shutdown()
        return [kernels, *(result.outputs[0] for result in found)]

    expected = answers()
    monkeypatch.setattr("toolkit.worker.worker.kernels_for", lambda device: TritonKernels())
    actual = answers()
    assert (expected[0], actual[0]) == (CPUKernels, TritonKernels)
    for a, b in zip(expected[1:], actual[1:], strict=True):
        assert list(a.token_ids) == list(b.token_ids)
    (expected_logprobs,) = (a.logprobs for a in expected[1:] if a.logprobs)
    (logprobs,) = (b.logprobs for b in actual[1:] if b.logprobs)
    for a, b in zip(expected_logprobs, logprobs, strict=True):
        assert list(a) == list(b)
        assert next(iter(a.values())).rank == next(iter(b.values())).rank
        assert [x.logprob for x in a.values()] == pytest.approx(
            [x.logprob for x in b.values()], abs=1e-4
        )


@pytest.mark.on_cpu("triton")
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_warm_up_compiles_all_kinds_of_steps(checkpoint, triton_runs, monkeypatch, backend):
    """Nothing is compiled here, but steps that would compile run, if they are not padded."""
    if not triton_runs:
        pytest.skip("Triton was imported without its interpreter")
    kernels = TritonKernels()
    kernels.compiled_side_by_side = lambda num_threads: contextlib.nullcontext()
    monkeypatch.setattr("toolkit.worker.worker.kernels_for", lambda device: kernels)
    monkeypatch.setattr("toolkit.attention.triton.triton_kernels_for", lambda device: kernels)
    monkeypatch.setattr(TritonBackend, "unsupported_reason", classmethod(lambda cls, *fit: None))
    settings = {
        "max_num_seqs": 3,
        "block_size": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 24,
    }
    settings["enforce_eager"] = True
    llm = LLM(str(checkpoint("qwen3")), device="cpu", attention_backend=backend, **settings)
    worker = engines.worker(llm)
    sizes = []
    backend_of = worker.runner.model.keepers()[0].backend
    attend = backend_of.forward

    def forward(layer, qkv, batch):
        sizes.append((len(qkv), batch.max_query_len))
        return attend(layer, qkv, batch)

    def rehearse(shapes):
        sizes.extend((shape.num_tokens, shape.max_query_len) for shape in shapes)

    monkeypatch.setattr(backend_of, "forward", forward)
    monkeypatch.setattr(worker.runner, "rehearse", rehearse)
    WarmUp(worker.runner, worker.info, 3).compile(kernels, 2)
    assert {(1, 1), (2, 1), (3, 1)} <= set(sizes), "decode steps"
    assert {num_tokens for num_tokens, longest in sizes if longest > 1} >= {8, 15, 16}
    llm.shutdown()


def test_decode_attention_gets_the_order():
    batch = AttentionBatch(
        torch.zeros(3),
        (GroupTable(torch.zeros(3), torch.zeros(3)),),
        *[torch.zeros(3)] * 3,
        max_query_len=1,
        max_seq_len=9,
        order=torch.tensor([2, 0, 1]),
    )
    backend, received = TritonBackend.__new__(TritonBackend), {}
    backend._decode = lambda *tensors, **more: received.update(more)
    layer = Attention(AttentionShape(4, 2, 32, 1.0), HeadTransform())
    layer.bind(torch.zeros(3), torch.zeros(3))
    backend.forward(layer, torch.zeros(3), batch)
    assert received["order"] is batch.order
