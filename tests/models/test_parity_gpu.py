"""Parity with Transformers on a GPU: `make test-gpu`.

Correct engines may choose differently between two tokens that are almost equally likely, and then
diverge. So each of our tokens is checked with an fp32 Transformers forward over our own sequence:
it must be the likeliest token there, within a tolerance: in 16 bits, Transformers' own error.
"""

from __future__ import annotations

import copy
import gc
import random
import threading
from pathlib import Path

import pytest
import torch

from tests import checkpoints, engines
from tests.checkpoints import NEW_TOKENS, VOCAB, generate
from tests.models.architectures import ARCHITECTURES, OVERFLOWS_FP16, POSITIONS
from tests.models.conftest import SMALL_POOL, Case
from tests.models.test_stress import random_request
from toolkit import LLM
from toolkit.config.sources import CHECK_MEMORY
from toolkit.errors import CheckpointError, ConfigError, OutOfMemoryError
from toolkit.hardware import memory
from toolkit.hardware.graph_capture import captured, empty_cache
from toolkit.kernels import cublas
from toolkit.kernels.table import kernels_for
from toolkit.weights.loading import loader
from toolkit.worker.startup.warm_up import WarmUp

pytestmark = pytest.mark.gpu

MODES_OF_FEW: dict[str, dict] = {
    "no-overlap": {"async_scheduling": False},
    "no-graphs": {"enforce_eager": True},
    "neither": {"async_scheduling": False, "enforce_eager": True},
    "chunked": {"max_num_batched_tokens": 7, "block_size": 4},
    "recompute": SMALL_POOL | {"swap_space": 0.0},
    "swap": SMALL_POOL | {"swap_space": 0.01},
}
SIZES = {"kv_cache_memory": 0.05, "max_num_seqs": 16}


class Noise:
    """The largest error of Transformers' log-probabilities, by type."""

    def __init__(self, case: Case, prompts: list[list[int]] | None = None) -> None:
        self._case, self._prompts = case, prompts or case.prompts
        self._known = {"float32": 1e-4}

    def __getitem__(self, dtype: str) -> float:
        """Return the error over the prompts and as many random tokens as are generated."""
        if dtype not in self._known:
            rng, errors = random.Random(dtype), []
            rounded = copy.deepcopy(self._case.model).to("cuda", getattr(torch, dtype))
            for prompt in self._prompts:
                sequence = prompt + [rng.randrange(VOCAB) for _ in range(NEW_TOKENS)]
                theirs = checkpoints.logits(rounded, sequence).float().log_softmax(-1).cpu()
                exact = self._case.logits(sequence).log_softmax(-1)
                errors.append(float((theirs - exact).abs().max()))
            self._known[dtype] = max(errors)
        return self._known[dtype]

    def tolerance(self, dtype: str) -> float:
        """Return how much less likely a right choice may be than the likeliest token.

        In 16 bits: two tokens, each with twice Transformers' error."""
        return self[dtype] * (1 if dtype == "float32" else 4)


@pytest.fixture(scope="module")
def noise(case: Case) -> Noise:
    return Noise(case)


def check(case: Case, noise: Noise, dtype: str, settings: dict) -> None:
    if dtype == "float16" and case.name in OVERFLOWS_FP16:
        pytest.skip("overflows in fp16")
    llm = case.engine(dtype=dtype, **SIZES, **settings)
    case.assert_greedy(generate(llm, case.prompts), noise.tolerance(dtype))
    assert engines.scheduler(llm).pool.usage == 0
    llm.shutdown()


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [
        ("float32", "auto"),
        ("float16", "auto"),
        ("bfloat16", "auto"),
        ("float32", "torch"),
        ("bfloat16", "flash"),
    ],
)
def test_greedy_tokens_are_right_choices(case, noise, dtype, backend):
    try:
        check(case, noise, dtype, {"attention_backend": backend})
    except ConfigError as error:
        if backend != "flash" or error.param != "attention_backend":
            raise
        pytest.skip(error.message)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("mode", MODES_OF_FEW)
def test_tokens_of_a_few_are_right_choices_in_more_modes(few, mode, dtype):
    check(few, Noise(few), dtype, MODES_OF_FEW[mode])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_prefix_cache_hits_parallel_answers_and_prompt_logprobs(few, dtype):
    noise = Noise(few)
    llm = few.engine(dtype=dtype, kv_cache_memory=0.05, max_num_seqs=32, max_num_batched_tokens=40)
    few.assert_greedy(generate(llm, few.prompts, n=2), noise.tolerance(dtype))
    again = generate(llm, few.prompts)
    assert [r.num_cached_tokens for r in again] == [(len(p) - 1) // 16 * 16 for p in few.prompts]
    few.assert_greedy(again, noise.tolerance(dtype))
    for result in generate(llm, few.prompts, prompt_logprobs=1):
        prompt = result.prompt_token_ids
        reference = few.logits(prompt).log_softmax(-1)
        for index, position in enumerate(result.prompt_logprobs[1:]):
            token = prompt[index + 1]
            assert position[token].logprob == pytest.approx(
                float(reference[index, token]), abs=2 * noise[dtype]
            )


@pytest.mark.parametrize("eager", [False, True])
def test_starting_a_step_never_waits_for_the_gpu(checkpoint, monkeypatch, eager):
    """For all kinds of requests. PyTorch raises an error if it would wait for the GPU."""
    monkeypatch.delenv(CHECK_MEMORY)  # which waits
    llm = LLM(str(checkpoint("qwen3")), kv_cache_memory=0.05, max_num_seqs=16, enforce_eager=eager)
    worker, steps = engines.worker(llm), []
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
    [ours], [expected] = generate(llm, prompts), generate(usual, prompts)
    assert ours.outputs[0].token_ids == expected.outputs[0].token_ids


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
            generate(llm, [[1, 2, 3]] * 9)
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


def wide_case(folder: Path, family: str, **sizes: int) -> Case:
    """Return a case of a model like llama3-gqa with other sizes."""
    model = checkpoints.make_model(family, ARCHITECTURES["llama3-gqa"][1] | sizes)
    return Case("wide", checkpoints.save(model, folder), model)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("budget", [2048, 72])
def test_head_size_128(tmp_path, monkeypatch, budget, dtype):
    """On Hopper, prompts use a separate kernel: at once, in chunks, and after cached prefixes."""
    from toolkit.kernels.triton.attention import attention

    steps = []
    prefill = attention._prefill_on_hopper
    monkeypatch.setattr(
        attention, "_prefill_on_hopper", lambda *args: steps.append(1) or prefill(*args)
    )
    case = wide_case(tmp_path, "Qwen3", head_dim=128, max_position_embeddings=512)
    rng = random.Random(7)
    case.prompts = [
        [rng.randrange(VOCAB) for _ in range(length)] for length in (1, 15, 64, 65, 130, 260, 400)
    ]
    tolerance = Noise(case).tolerance(dtype)
    llm = case.engine(dtype=dtype, **SIZES, max_num_batched_tokens=budget)
    case.assert_greedy(generate(llm, case.prompts), tolerance)
    again = generate(llm, [prompt + case.prompts[1] for prompt in case.prompts])
    assert any(result.num_cached_tokens for result in again)
    case.assert_greedy(again, tolerance)
    assert steps or torch.cuda.get_device_capability()[0] != 9


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_norms_are_joined_with_products_of_many_requests(tmp_path, monkeypatch, family):
    """Sizes that the kernels for few rows support at any number of tokens."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 3}
    case = wide_case(tmp_path, family, **sizes)
    rng = random.Random(5)
    case.prompts = [[rng.randrange(VOCAB) for _ in range(3 + i)] for i in range(40)]
    tolerance = Noise(case, case.prompts[::8]).tolerance("bfloat16")
    kernels, rows = kernels_for(torch.device("cuda", 0)), []
    add_norm = kernels.product_add_norm
    monkeypatch.setattr(
        kernels, "product_add_norm", lambda x, *rest: rows.append(len(x)) or add_norm(x, *rest)
    )
    for count in (40, 21, 7):
        llm = case.engine(dtype="bfloat16", kv_cache_memory=0.05, max_num_seqs=48)
        case.assert_greedy(generate(llm, case.prompts[:count]), tolerance)
        llm.shutdown()
    assert min(rows) <= 8
    assert max(rows) > 32


def test_step_out_of_memory_is_split(checkpoint, monkeypatch):
    """Large steps fail with PyTorch's error; every request is still answered correctly."""
    case = Case("gpt2", checkpoint("gpt2"))
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB) for _ in range(20)] for _ in range(6)]
    llm = case.engine(dtype="float32", kv_cache_memory=0.05, max_num_seqs=8)
    runner = engines.runner(llm)
    execute, failures = runner.execute, [0]

    def failing(step):
        if step.total_tokens > 40:
            failures[0] += 1
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")
        return execute(step)

    monkeypatch.setattr(runner, "execute", failing)
    results = generate(llm, prompts)
    assert failures[0] >= 1
    case.assert_greedy(results)
