"""Parity with Transformers on a GPU: `make test-gpu`.

In fp32 all tokens equal Transformers'. In 16 bits, correct engines may choose differently between
two tokens that are almost equally likely, and then diverge. So each of our tokens is checked with
an fp32 Transformers forward over our own sequence: it must be the likeliest token there, within a
tolerance measured from Transformers' own error in that type.
"""

from __future__ import annotations

import gc
import random
import threading

import pytest
import torch

from tests import checkpoints
from tests.checkpoints import NEW_TOKENS, POSITIONS, VOCAB
from tests.models.test_stress import random_request
from toolkit import LLM, SamplingParams
from toolkit.errors import CheckpointError, OutOfMemoryError
from toolkit.hardware import memory
from toolkit.hardware.graph_capture import captured, empty_cache
from toolkit.kernels import cublas
from toolkit.kernels.table import kernels_for
from toolkit.weights import loader
from toolkit.worker.warm_up import WarmUp

pytestmark = pytest.mark.gpu

FEW = ("gpt2", "llama3-gqa", "llama31-rope", "mistral-window", "qwen2-tied-some-windows", "qwen3")
"""Models for tests that do not depend on the architecture."""

MODES: dict[str, dict] = {
    "ragged": {},
    "no-overlap": {"async_scheduling": False},
    "no-graphs": {"enforce_eager": True},
    "neither": {"async_scheduling": False, "enforce_eager": True},
    "reference-attention": {"attention_backend": "torch"},
    "chunked": {"max_num_batched_tokens": 7, "block_size": 4},
    "recompute": {
        "num_gpu_blocks_override": 44,
        "block_size": 4,
        "swap_space": 0.0,
        "enable_prefix_caching": False,
    },
    "swap": {
        "num_gpu_blocks_override": 44,
        "block_size": 4,
        "swap_space": 0.01,
        "enable_prefix_caching": False,
    },
}


@pytest.fixture(scope="module")
def noise(case):
    """Return the largest error of Transformers' log-probabilities over the prompts, by type."""
    name, _, model, prompts, expected = case
    sequences = [prompt + tokens for prompt, tokens in zip(prompts, expected, strict=True)]
    exact = [checkpoints.logits(model, s).log_softmax(-1) for s in sequences]
    found = {"float32": 1e-4}
    for dtype in (torch.float16, torch.bfloat16):
        rounded = checkpoints.make_reference(name).to("cuda", dtype)
        with torch.no_grad():
            theirs = [
                rounded(torch.tensor([s], device="cuda")).logits[0].float().log_softmax(-1).cpu()
                for s in sequences
            ]
        found[str(dtype).removeprefix("torch.")] = max(
            float((a - b).abs().max()) for a, b in zip(theirs, exact, strict=True)
        )
    return found


def run(llm: LLM, prompts: list[list[int]], **params: object):
    settings = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, **params)
    return llm.generate([{"prompt_token_ids": p} for p in prompts], settings, use_tqdm=False)


def check(results, model, expected, dtype: str, noise: dict[str, float]) -> None:
    """Check that every answer has the requested length, and that every token is a right choice."""
    for result, tokens in zip(results, expected, strict=True):
        for answer in result.outputs:
            ours = list(answer.token_ids)
            assert len(ours) == NEW_TOKENS
            if dtype == "float32":
                assert ours == tokens
                continue
            reference = checkpoints.logits(model, result.prompt_token_ids + ours).log_softmax(-1)
            at = reference[len(result.prompt_token_ids) - 1 : -1]
            behind = at.max(-1).values - at.gather(-1, torch.tensor(ours)[:, None])[:, 0]
            # Two tokens, each with twice Transformers' error.
            assert float(behind.max()) < 4 * noise[dtype]


@pytest.mark.parametrize("mode", MODES)
def test_greedy_tokens_in_fp32_equal_transformers(case, mode):
    name, folder, model, prompts, expected = case
    if mode != "ragged" and name not in FEW:
        pytest.skip("covered by other architectures")
    llm = LLM(str(folder), dtype="float32", kv_cache_memory=0.05, max_num_seqs=16, **MODES[mode])
    check(run(llm, prompts), model, expected, "float32", {})
    assert llm._core.scheduler.pool.usage == 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mode", ["ragged", "neither", "chunked", "swap"])
def test_tokens_in_16_bits_are_right_choices(case, noise, mode, dtype):
    name, folder, model, prompts, expected = case
    if mode != "ragged" and name not in FEW:
        pytest.skip("covered by other architectures")
    llm = LLM(str(folder), dtype=dtype, kv_cache_memory=0.05, max_num_seqs=16, **MODES[mode])
    check(run(llm, prompts), model, expected, dtype, noise)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_prefix_cache_hits_parallel_answers_and_prompt_logprobs(case, noise, dtype):
    name, folder, model, prompts, expected = case
    if name not in FEW:
        pytest.skip("covered by other architectures")
    llm = LLM(
        str(folder), dtype=dtype, kv_cache_memory=0.05, max_num_seqs=32, max_num_batched_tokens=40
    )
    check(run(llm, prompts, n=2), model, expected, dtype, noise)
    again = run(llm, prompts)
    assert [r.num_cached_tokens for r in again] == [(len(p) - 1) // 16 * 16 for p in prompts]
    check(again, model, expected, dtype, noise)
    for result, prompt in zip(run(llm, prompts, prompt_logprobs=1), prompts, strict=True):
        reference = checkpoints.logits(model, prompt).log_softmax(-1)
        for index, position in enumerate(result.prompt_logprobs[1:]):
            token = prompt[index + 1]
            assert position[token].logprob == pytest.approx(
                float(reference[index, token]), abs=2 * noise[dtype]
            )


@pytest.mark.parametrize("eager", [False, True])
def test_starting_a_step_never_waits_for_the_gpu(checkpoint, monkeypatch, eager):
    """For all kinds of requests. PyTorch raises an error if it would wait for the GPU."""
    llm = LLM(str(checkpoint("qwen3")), kv_cache_memory=0.05, max_num_seqs=16, enforce_eager=eager)
    worker, steps = llm._core.executor._worker, []
    execute = worker.execute

    def watched(step):
        steps.append(len(step.rows))
        torch.cuda.set_sync_debug_mode("error")
        try:
            return execute(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(worker, "execute", watched)
    rng = random.Random(3)
    requests = [random_request(rng, list(range(20))) for _ in range(60)]
    found = llm.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in requests],
        [p for _, p in requests],
        use_tqdm=False,
    )
    assert all(answer.token_ids for result in found for answer in result.outputs)
    assert max(steps) == 16
    llm.shutdown()


@pytest.mark.alone
def test_memory_is_profiled_and_one_full_request_is_required(checkpoint):
    folder = str(checkpoint("llama3-gqa"))
    llm = LLM(folder, gpu_memory_utilization=0.2, max_num_seqs=8)
    total = torch.cuda.get_device_properties(0).total_memory
    assert 0.1 * total < llm.info.cache_bytes < 0.2 * total
    llm.shutdown()
    with pytest.raises(OutOfMemoryError, match="max-model-len"):
        LLM(folder, kv_cache_memory=1e-5, max_num_seqs=8)


@pytest.mark.alone
def test_kernels_compile_while_weights_are_read(checkpoint, monkeypatch):
    compiling, read, compile_all = threading.Event(), loader.read_into, WarmUp.compile

    def read_once_compiling(found, stop):
        assert compiling.wait(60)
        read(found, stop)

    def compile_and_signal(self, *args, **kwargs):
        compiling.set()
        compile_all(self, *args, **kwargs)

    monkeypatch.setattr(loader, "read_into", read_once_compiling)
    monkeypatch.setattr(WarmUp, "compile", compile_and_signal)
    folder, prompts = str(checkpoint("qwen3")), [[5, 6, 7]]
    llm = LLM(folder, dtype="float32", gpu_memory_utilization=0.2, max_num_seqs=8)
    monkeypatch.undo()
    usual = LLM(folder, dtype="float32", num_gpu_blocks_override=64, max_num_seqs=8)
    assert run(llm, prompts)[0].outputs[0].token_ids == run(usual, prompts)[0].outputs[0].token_ids


@pytest.mark.alone
def test_unreadable_checkpoint_is_named_even_late(checkpoint, monkeypatch):
    def broken(found, stop):
        raise CheckpointError("x.safetensors ends early.")

    monkeypatch.setattr(loader, "read_into", broken)
    with pytest.raises(CheckpointError, match=r"x\.safetensors ends early"):
        LLM(str(checkpoint("qwen3")), gpu_memory_utilization=0.2, max_num_seqs=8)


@pytest.mark.alone
def test_too_large_a_step_is_an_error_with_advice(checkpoint):
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**28) / total)
    try:
        message = r"the largest step, \d+ tokens.*--max-num-batched-tokens"
        with pytest.raises(OutOfMemoryError, match=message):
            LLM(str(checkpoint("llama3-gqa")), max_num_batched_tokens=2**21, max_num_seqs=2**15)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.alone
def test_cuda_graphs_leave_almost_all_memory_to_the_cache(checkpoint):
    """Their memory is counted once, regardless of their number."""
    sizes = []
    for eager in (True, False):
        llm = LLM(
            str(checkpoint("gpt2")),
            gpu_memory_utilization=0.2,
            max_num_seqs=64,
            enforce_eager=eager,
        )
        sizes.append(llm.info.cache_bytes)
        llm.shutdown()
        del llm
        gc.collect()
        torch.cuda.empty_cache()
    assert 0 <= sizes[0] - sizes[1] < 2**29


@pytest.mark.alone
def test_memory_of_cuda_graphs_is_subtracted_from_the_cache(checkpoint):
    sizes, totals = [], []
    for eager in (True, True, False):  # the first allocates memory that stays with the process
        llm = LLM(str(checkpoint("gpt2")), gpu_memory_utilization=0.2, enforce_eager=eager)
        sizes.append(llm.info.cache_bytes)
        totals.append(torch.cuda.mem_get_info()[0] + llm.info.cache_bytes)
        llm.shutdown()
        del llm
        gc.collect()
        torch.cuda.empty_cache()
    assert sizes[1] - sizes[2] >= totals[1] - totals[2] > 0


@pytest.mark.alone
def test_shutdown_frees_the_memory(checkpoint):
    """Check that another process, and another engine in this one, can use it."""
    settings = {"gpu_memory_utilization": 0.5, "max_num_seqs": 8, "dtype": "bfloat16"}
    # The first allocates memory that stays with the process.
    for name in ("gpt2", "gpt2", "llama3-gqa"):
        before = torch.cuda.mem_get_info()[0]
        gc.disable()  # shutdown must not rely on the garbage collector
        try:
            llm = LLM(str(checkpoint(name)), **settings)
            run(llm, [[1, 2, 3]] * 9)
            assert torch.cuda.mem_get_info()[0] < before - 2**30
            llm.shutdown()
        finally:
            gc.enable()
        left = before - torch.cuda.mem_get_info()[0]
    assert left < 2**28


@pytest.mark.alone
def test_memory_kept_by_the_allocator_counts_as_available():
    """PyTorch's allocator keeps it for later tensors."""
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    kept = torch.empty(free - 2**28, dtype=torch.uint8, device="cuda")
    del kept
    assert torch.cuda.mem_get_info()[0] < 2**29
    assert memory.available(torch.device("cuda", 0)) > 0.9 * free


@pytest.mark.alone
def test_empty_cache_waits_for_another_threads_capture():
    """PyTorch does not allow it during a capture, so it waits."""
    stream, failed = torch.cuda.Stream(), []

    def release() -> None:
        try:
            empty_cache()
        except RuntimeError as error:
            failed.append(error)

    x = torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        x + 1
        stream.synchronize()
        with captured(graph):
            y = x + 1
            thread = threading.Thread(target=release)
            thread.start()
            thread.join(1)
            assert thread.is_alive()
    thread.join(30)
    assert not failed
    assert not thread.is_alive()
    graph.replay()
    torch.cuda.synchronize()
    assert y.tolist() == [1.0] * 8


def test_matrix_products_of_the_largest_step_are_tuned(checkpoint, monkeypatch):
    monkeypatch.setattr(cublas, "_chosen", {})
    folder, most = str(checkpoint("qwen3")), 5000 // POSITIONS + 1
    cases = (
        (2048, most, set()),
        (4096, most, {4096}),
        (5000, most, {4096, 5000}),
        (6000, 8, {4096, 5000}),
    )
    for tokens, num_seqs, chosen in cases:
        sizes = {
            "max_num_batched_tokens": tokens,
            "max_num_seqs": num_seqs,
            "kv_cache_memory": 0.05,
        }
        LLM(folder, dtype="bfloat16", **sizes).shutdown()
        assert {key[2] for key in cublas._chosen} == chosen


def test_engine_starts_while_another_is_garbage(checkpoint):
    """Graphs must not be destroyed while others are captured."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()  # leaves the old generations empty, so that they are collected often
    try:
        llm = LLM(str(checkpoint("gpt2")), kv_cache_memory=0.05, max_num_seqs=8)
        llm.cycle = llm
        del llm
        gc.set_threshold(10, 1, 1)
        llm = LLM(str(checkpoint("llama3-gqa")), kv_cache_memory=0.05, max_num_seqs=8)
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
    llm.shutdown()


def greatest_error(model, rounded, prompts: list[list[int]]) -> float:
    """Return the largest error of `rounded`'s log-probabilities, over prompts and greedy tokens."""
    errors = []
    for prompt in prompts:
        sequence = prompt + checkpoints.greedy(model, prompt, NEW_TOKENS)
        with torch.no_grad():
            theirs = (
                rounded(torch.tensor([sequence], device="cuda"))
                .logits[0]
                .float()
                .log_softmax(-1)
                .cpu()
            )
        errors.append(
            float((theirs - checkpoints.logits(model, sequence).log_softmax(-1)).abs().max())
        )
    return max(errors)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("budget", [2048, 72])
def test_head_size_128(tmp_path, monkeypatch, budget, dtype):
    """On Hopper, prompts use a separate kernel: at once, in chunks, and after cached prefixes."""
    from toolkit.kernels.triton import attention

    steps = []
    prefill = attention._prefill_on_hopper
    monkeypatch.setattr(
        attention, "_prefill_on_hopper", lambda *args: steps.append(1) or prefill(*args)
    )
    sizes = {"head_dim": 128, "max_position_embeddings": 512}
    settings = checkpoints.ARCHITECTURES["llama3-gqa"][1] | sizes
    monkeypatch.setitem(checkpoints.ARCHITECTURES, "wide", ("Qwen3", settings))
    model = checkpoints.make_reference("wide")
    folder = checkpoints.save(model, tmp_path / "wide")
    rng = random.Random(7)
    prompts = [
        [rng.randrange(VOCAB) for _ in range(length)] for length in (1, 15, 64, 65, 130, 260, 400)
    ]
    rounded = checkpoints.make_reference("wide").to("cuda", getattr(torch, dtype))
    noise = {dtype: greatest_error(model, rounded, prompts)}
    llm = LLM(
        str(folder),
        dtype=dtype,
        kv_cache_memory=0.05,
        max_num_seqs=16,
        max_num_batched_tokens=budget,
    )
    expected = [[]] * len(prompts)
    check(run(llm, prompts), model, expected, dtype, noise)
    again = run(llm, [prompt + prompts[1] for prompt in prompts])
    assert any(result.num_cached_tokens for result in again)
    check(again, model, expected, dtype, noise)
    assert steps or torch.cuda.get_device_capability()[0] != 9


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_norms_are_joined_with_products_of_many_requests(tmp_path, monkeypatch, family):
    """Sizes that the kernels for few rows support at any number of tokens."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 3}
    settings = checkpoints.ARCHITECTURES["llama3-gqa"][1] | sizes
    monkeypatch.setitem(checkpoints.ARCHITECTURES, "wide", (family, settings))
    model = checkpoints.make_reference("wide")
    folder = checkpoints.save(model, tmp_path / "wide")
    rng = random.Random(5)
    prompts = [[rng.randrange(VOCAB) for _ in range(3 + i)] for i in range(40)]
    rounded = checkpoints.make_reference("wide").to("cuda", torch.bfloat16)
    error = greatest_error(model, rounded, prompts[::8])
    kernels, rows = kernels_for(torch.device("cuda", 0)), []
    add_norm = kernels.linear_add_norm
    monkeypatch.setattr(
        kernels, "linear_add_norm", lambda x, *rest: rows.append(len(x)) or add_norm(x, *rest)
    )
    for count in (40, 21, 7):
        llm = LLM(str(folder), dtype="bfloat16", kv_cache_memory=0.05, max_num_seqs=48)
        check(run(llm, prompts[:count]), model, [[]] * count, "bfloat16", {"bfloat16": error})
        llm.shutdown()
    assert min(rows) <= 8
    assert max(rows) > 32


def test_step_out_of_memory_is_split(checkpoint, monkeypatch):
    """Large steps fail with PyTorch's error; every request is still answered correctly."""
    model = checkpoints.make_reference("gpt2")
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB) for _ in range(20)] for _ in range(6)]
    llm = LLM(str(checkpoint("gpt2")), dtype="float32", kv_cache_memory=0.05, max_num_seqs=8)
    runner = llm._core.executor._worker.runner
    execute, failures = runner.execute, [0]

    def failing(step):
        if step.total_tokens > 40:
            failures[0] += 1
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")
        return execute(step)

    monkeypatch.setattr(runner, "execute", failing)
    results = run(llm, prompts)
    assert failures[0] >= 1
    check(
        results, model, [checkpoints.greedy(model, p, NEW_TOKENS) for p in prompts], "float32", {}
    )
