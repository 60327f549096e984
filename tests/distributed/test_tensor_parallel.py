"""Tensor parallelism on CPUs, over gloo: equal to one process and to Transformers."""

from __future__ import annotations

import random

import pytest
import torch

from tests import checkpoints, engines
from tests.checkpoints import VOCAB, generate
from tests.pooling.folders import bert, bert_tokenizer, save
from toolkit import LLM, SamplingParams, StructuredOutputsParams
from toolkit.distributed import Group, aligned_shard, kv_head_shard, parallel
from toolkit.errors import CheckpointError, ConfigError, EngineError, WorkersLostError
from toolkit.models.build import build_model, load_config
from toolkit.weights.loading.loader import load_weights
from toolkit.worker import Report
from toolkit.worker.info import WorkerInfo
from toolkit.worker.worker import Worker

pytestmark = pytest.mark.usefixtures("forked_processes")

SMALL = {"num_threads": 1, "num_gpu_blocks_override": 200, "block_size": 4, "max_num_seqs": 8}
NEW_TOKENS = 20


@pytest.fixture
def sharded(checkpoint):
    """Loader of models over ranks, which end with the test."""
    loaded = []

    def make(name: str, size: int = 2, **settings: object) -> LLM:
        loaded.append(LLM(str(checkpoint(name)), tensor_parallel_size=size, **SMALL | settings))
        return loaded[-1]

    yield make
    for llm in loaded:
        llm.shutdown()


def prompts_for(name: str) -> list[list[int]]:
    rng = random.Random(name)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in (1, 17, 40)]


def check_tokens_and_logprobs(
    llm: LLM, name: str, prompts: list[list[int]], new_tokens: int
) -> None:
    """Compare tokens and the log-probabilities of all positions with Transformers."""
    model = checkpoints.make_reference(name)
    results = generate(llm, prompts, max_tokens=new_tokens, prompt_logprobs=0, logprobs=0)
    for prompt, result in zip(prompts, results, strict=True):
        [answer] = result.outputs
        sequence = prompt + list(answer.token_ids)
        assert sequence[len(prompt) :] == model.greedy(prompt, new_tokens)
        found = [*result.prompt_logprobs[1:], *answer.logprobs]
        ours = [at[token].logprob for at, token in zip(found, sequence[1:], strict=True)]
        assert ours == pytest.approx(model.logprobs(sequence), abs=2e-4)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *[("llama3-gqa", 2), ("olmo2", 4), ("llama-mqa-tied", 2), ("gpt-neox", 2), ("falcon", 2)],
        *[("qwen2-moe", 2), ("gpt-oss", 2), ("minimax-m2", 2), ("gemma4-moe", 2)],
    ],
)
def test_greedy_tokens_and_logprobs_equal_transformers(sharded, name, size):
    """With fewer KV heads than ranks, and an uneven vocabulary. The pipeline's tests have more."""
    llm = sharded(name, size, max_num_batched_tokens=24)
    check_tokens_and_logprobs(llm, name, prompts_for(name), NEW_TOKENS)


@pytest.mark.parametrize("name", ["gpt-oss", "granite-moe-shared", "llama4"])
def test_ranks_with_complete_experts_equal_transformers(sharded, name):
    llm = sharded(name, 2, max_num_batched_tokens=24, enable_expert_parallel=True)
    check_tokens_and_logprobs(llm, name, prompts_for(name), NEW_TOKENS)


@pytest.mark.parametrize("settings", [{}, {"model_impl": "transformers"}])
def test_expert_parallelism_is_refused_without_experts(checkpoint, settings):
    with pytest.raises(ConfigError, match="--enable-expert-parallel: the model has no experts"):
        LLM(str(checkpoint("qwen3")), enable_expert_parallel=True, **SMALL | settings)


def test_experts_that_ranks_do_not_divide_are_refused(checkpoint):
    with pytest.raises(ConfigError, match="5 experts cannot be divided evenly"):
        LLM(
            str(checkpoint("mixtral")),
            tensor_parallel_size=2,
            enable_expert_parallel=True,
            **SMALL,
        )


def test_all_kinds_of_sampling_equal_one_process(checkpoint):
    """Grammars, penalties, processors, preemption, siblings: ranks must apply messages alike."""
    kinds = [
        SamplingParams(temperature=0.9, seed=1, max_tokens=16, ignore_eos=True, n=2),
        SamplingParams(
            temperature=0.8, seed=2, top_p=0.8, max_tokens=16, ignore_eos=True, logprobs=2
        ),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=16, ignore_eos=True),
        SamplingParams(
            seed=3, max_tokens=8, structured_outputs=StructuredOutputsParams(regex="[ab]{6}")
        ),
        SamplingParams(
            temperature=0.0, max_tokens=16, ignore_eos=True, extra_args={"no_repeat": 20}
        ),
    ]
    prompts = [{"prompt_token_ids": p} for p in prompts_for("sampling") + prompts_for("more")[:2]]
    found = []
    for size in (1, 2):
        tight = SMALL | {"num_gpu_blocks_override": 30, "max_model_len": 100, "swap_space": 0.001}
        llm = LLM(
            str(checkpoint("qwen3")),
            tensor_parallel_size=size,
            async_scheduling=size == 2,
            logits_processors=["tests.inside.plugged:NoRepeat"],
            **tight,
        )
        results = llm.generate(prompts, kinds, use_tqdm=False)
        found.append([[list(answer.token_ids) for answer in result.outputs] for result in results])
        llm.shutdown()
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in ("gpt2", "llama3-gqa", "llama-biases-head-dim", "qwen2")),
        *((name, {}) for name in ("qwen3-tied", "olmo2", "mistral-window")),
        *((name, {"safe_serialization": False}) for name in ("gpt2", "llama-biases-head-dim")),
    ],
)
def test_each_rank_holds_its_shard_of_every_tensor(checkpoint, tmp_path, name, options):
    """Joined, the ranks' shards are the checkpoint."""
    folder = checkpoint(name)
    if options:
        torch.save(checkpoints.make_reference(name).tensors(), tmp_path / "pytorch_model.bin")
        (tmp_path / "config.json").write_text((folder / "config.json").read_text())
        folder = tmp_path
    unsharded = checkpoints.make_reference(name).tensors()
    joined = {tensor: torch.full_like(value, torch.nan) for tensor, value in unsharded.items()}
    for rank in range(2):
        with parallel(Group(rank, 2)):
            model = build_model(
                load_config(folder),
                device=torch.device("cpu"),
                dtype=torch.float32,
                max_model_len=8,
            )
        load_weights(model, folder, "auto")
        for tensor, slot in model.slots().items():
            for part in slot.parts:
                region = tuple(slice(s.begin, s.begin + s.count) for s in part.region)
                joined[tensor][region] = part.target.T if part.transpose else part.target
    for tensor, value in unsharded.items():
        if tensor in model.slots():
            assert torch.equal(joined[tensor], value), tensor


def test_kv_heads_are_sharded_or_replicated():
    def held(heads: int, size: int) -> list[tuple[int, int]]:
        found = []
        for rank in range(size):
            with parallel(Group(rank, size)):
                shard = kv_head_shard(heads)
            found.append((shard.begin, shard.count))
        return found

    assert held(8, 4) == [(0, 2), (2, 2), (4, 2), (6, 2)]
    assert held(2, 4) == [(0, 1), (0, 1), (1, 1), (1, 1)]
    with pytest.raises(ConfigError, match="6 KV heads cannot be divided"):
        held(6, 4)


@pytest.mark.parametrize(
    ("total", "size", "multiple"), [(262, 4, 1), (262, 4, 64), (3, 4, 1), (128, 2, 64)]
)
def test_shards_of_a_vocabulary_are_complete(total, size, multiple):
    tokens = []
    for rank in range(size):
        with parallel(Group(rank, size)):
            shard = aligned_shard(total, multiple)
        assert shard.count <= shard.max_count
        assert shard.max_count % multiple == 0
        assert shard.begin == min(total, rank * shard.max_count), "gathered logits are in order"
        tokens += range(shard.begin, shard.begin + shard.count)
    assert tokens == list(range(total))


def test_impossible_sizes_are_refused_with_possible_ones(checkpoint):
    with pytest.raises(
        ConfigError, match=r"size 3: the model's 4 attention heads .* Possible sizes: 1, 2, 4\."
    ):
        LLM(str(checkpoint("llama2-mha")), tensor_parallel_size=3, **SMALL)


def test_encoders_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="encoders run on one device"):
        LLM(str(save(bert(), bert_tokenizer(), tmp_path)), tensor_parallel_size=2)


def test_checkpoint_errors_are_reported_once(checkpoint, tmp_path, capfd):
    for file in checkpoint("llama3-gqa").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="is cut short"):
        LLM(str(tmp_path), tensor_parallel_size=2, **SMALL)
    assert "Traceback" not in capfd.readouterr().err


class TestTwoRanks:
    """Tests that share an engine, which works after each."""

    @pytest.fixture(scope="class")
    def llm(self, checkpoint):
        llm = LLM(str(checkpoint("qwen3")), tensor_parallel_size=2, **SMALL)
        yield llm
        llm.shutdown()

    def test_a_second_model_over_ranks_is_refused(self, llm, checkpoint):
        with pytest.raises(ConfigError, match="a rank of another model already"):
            LLM(str(checkpoint("gpt2")), tensor_parallel_size=2, **SMALL)

    def test_a_step_without_masks_keeps_the_ranks_in_step(self, llm, monkeypatch):
        """The next request with a grammar gets its own masks on every rank."""
        params = SamplingParams(
            seed=3, max_tokens=8, structured_outputs=StructuredOutputsParams(regex="[ab]{6}")
        )
        prompt = {"prompt_token_ids": [5, 6, 7]}
        [expected] = llm.generate([prompt], params, use_tqdm=False)
        constraints = engines.constraints(llm)
        masks, calls = constraints.masks, []

        def failing_once(requests):
            calls.append(requests)
            if len(calls) == 1:
                raise ValueError("masks failed")
            return masks(requests)

        monkeypatch.setattr(constraints, "masks", failing_once)
        with pytest.raises(EngineError, match="masks failed"):
            llm.generate([prompt], params, use_tqdm=False)
        [again] = llm.generate([prompt], params, use_tqdm=False)
        assert again.outputs[0].token_ids == expected.outputs[0].token_ids


class GPUShutdown:
    """Makes CPU workers shut down like those of a GPU. Counts releases of its memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, started = 0, Worker.start

        def start(worker: Worker, report: Report) -> WorkerInfo:
            info = started(worker, report)
            worker._stream = object()
            self.after_start()
            return info

        def empty_cache() -> None:
            self.count += 1

        monkeypatch.setattr(Worker, "start", start)
        monkeypatch.setattr("toolkit.worker.worker.empty_cache", empty_cache)

    def after_start(self) -> None:
        """Do nothing. Tests replace it."""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (KeyboardInterrupt, "interrupted in the middle of a step"),
        (RuntimeError("failure in a step"), "failure in a step"),
    ],
)
def test_no_step_runs_after_an_interrupt_or_error(sharded, monkeypatch, error, reason):
    """Other ranks may be in another step: sums would mix steps.

    GPU memory is not released either, since that would wait for running steps."""
    gpu = GPUShutdown(monkeypatch)
    llm = sharded("gpt2")
    worker = engines.worker(llm)
    execute = worker.execute

    def fail(step):
        raise error

    monkeypatch.setattr(worker, "execute", fail)
    prompt, params = {"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=3)
    with pytest.raises((KeyboardInterrupt, WorkersLostError)):
        llm.generate([prompt], params, use_tqdm=False)
    monkeypatch.setattr(worker, "execute", execute)
    with pytest.raises(WorkersLostError, match=reason):
        llm.generate([prompt], params, use_tqdm=False)
    llm.shutdown()  # the fixture calls it again, without effect
    assert gpu.count == 0


def test_gpu_memory_is_released_unless_the_start_was_interrupted(sharded, monkeypatch):
    gpu = GPUShutdown(monkeypatch)
    sharded("gpt2").shutdown()
    assert gpu.count == 1

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "after_start", interrupt)
    with pytest.raises(KeyboardInterrupt):
        sharded("gpt2")
    assert gpu.count == 1
