"""One model over several processes gives what one process gives, and Transformers: over gloo, on the CPU."""

from __future__ import annotations

import random

import psutil
import pytest
import torch

from tests import checkpoints
from tests.checkpoints import VOCAB
from tests.pooling.folders import bert, bert_tokenizer, save
from toolkit import LLM, SamplingParams, StructuredOutputsParams
from toolkit.distributed import Group, kv_heads, parallel, rounded_up
from toolkit.errors import CheckpointError, ConfigError, EngineError, WorkersLostError
from toolkit.models.build import build_model, load_config
from toolkit.weights.loader import load_weights
from toolkit.worker import Report
from toolkit.worker.info import WorkerInfo
from toolkit.worker.worker import Worker

SMALL = {"num_threads": 1, "num_gpu_blocks_override": 200, "block_size": 4, "max_num_seqs": 8}
NEW_TOKENS = 20


@pytest.fixture
def shared_out(checkpoint):
    """Loads a model over ranks, which are ended with the test."""
    loaded = []

    def load(name: str, size: int = 2, **settings: object) -> LLM:
        loaded.append(LLM(str(checkpoint(name)), tensor_parallel_size=size, **SMALL | settings))
        return loaded[-1]

    yield load
    for llm in loaded:
        llm.shutdown()


def prompts_for(name: str) -> list[list[int]]:
    rng = random.Random(name)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in (1, 17, 40)]


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("gpt2", 2),
        ("gpt2", 4),
        ("llama3-gqa", 2),
        ("llama3-gqa", 4),
        ("llama-mqa-tied", 2),
        ("qwen3", 4),
    ],
)
def test_greedy_tokens_and_log_probabilities_are_those_of_transformers(shared_out, name, size):
    """With 4 ranks llama3-gqa and qwen3 have more ranks than KV heads, and a vocabulary that does not divide."""
    model, prompts = checkpoints.make_reference(name), prompts_for(name)
    llm = shared_out(name, size, max_num_batched_tokens=24)
    params = SamplingParams(
        temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, prompt_logprobs=0
    )
    results = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    for prompt, result in zip(prompts, results, strict=True):
        assert list(result.outputs[0].token_ids) == checkpoints.greedy(model, prompt, NEW_TOKENS)
        expected = checkpoints.logits(model, prompt).log_softmax(-1)
        for position, found in enumerate(result.prompt_logprobs[1:]):
            token = prompt[position + 1]
            assert found[token].logprob == pytest.approx(float(expected[position, token]), abs=1e-4)


def test_sampling_grammars_penalties_preemption_and_siblings_agree_with_one_process(checkpoint):
    """Every rank has to apply every message alike for that."""
    kinds = [
        SamplingParams(temperature=0.9, seed=1, max_tokens=16, ignore_eos=True, n=2),
        SamplingParams(
            temperature=0.8, seed=2, top_p=0.8, max_tokens=16, ignore_eos=True, logprobs=2
        ),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=16, ignore_eos=True),
        SamplingParams(
            seed=3, max_tokens=8, structured_outputs=StructuredOutputsParams(regex="[ab]{6}")
        ),
    ]
    prompts = [{"prompt_token_ids": p} for p in prompts_for("sampling") + prompts_for("more")[:1]]
    found = []
    for size in (1, 2):
        tight = SMALL | {"num_gpu_blocks_override": 30, "max_model_len": 100, "swap_space": 0.001}
        llm = LLM(
            str(checkpoint("qwen3")), tensor_parallel_size=size, async_scheduling=size == 2, **tight
        )
        results = llm.generate(prompts, kinds, use_tqdm=False)
        found.append([[list(answer.token_ids) for answer in result.outputs] for result in results])
        llm.shutdown()
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["gpt2", "llama3-gqa", "llama-biases-head-dim"])
@pytest.mark.parametrize("options", [{}, {"safe_serialization": False}], ids=["safetensors", "bin"])
def test_each_rank_holds_its_part_of_every_tensor(checkpoint, tmp_path, name, options):
    """Put together again, the ranks' parts are the checkpoint."""
    folder = checkpoint(name)
    if options:
        torch.save(checkpoints.make_reference(name).state_dict(), tmp_path / "pytorch_model.bin")
        (tmp_path / "config.json").write_text((folder / "config.json").read_text())
        folder = tmp_path
    whole = checkpoints.make_reference(name).state_dict()
    put_together = {tensor: torch.full_like(value, torch.nan) for tensor, value in whole.items()}
    for rank in range(2):
        with parallel(Group(rank, 2)):
            model = build_model(
                load_config(folder),
                folder,
                device=torch.device("cpu"),
                dtype=torch.float32,
                max_model_len=8,
            )
        load_weights(model, folder, "auto")
        for tensor, slot in model.slots().items():
            for part in slot.parts:
                region = tuple(slice(s.begin, s.begin + s.count) for s in part.region)
                put_together[tensor][region] = part.target.T if part.transpose else part.target
    for tensor, value in whole.items():
        if tensor in model.slots():
            assert torch.equal(put_together[tensor], value), tensor


def test_kv_heads_are_shared_out_or_repeated():
    def held(heads: int, size: int) -> list[tuple[int, int]]:
        found = []
        for rank in range(size):
            with parallel(Group(rank, size)):
                share = kv_heads(heads)
            found.append((share.begin, share.count))
        return found

    assert held(8, 4) == [(0, 2), (2, 2), (4, 2), (6, 2)]
    assert held(2, 4) == [(0, 1), (0, 1), (1, 1), (1, 1)]
    with pytest.raises(ConfigError, match="6 KV heads cannot be shared out"):
        held(6, 4)


@pytest.mark.parametrize(
    ("total", "size", "multiple"), [(262, 4, 1), (262, 4, 64), (3, 4, 1), (128, 2, 64)]
)
def test_a_vocabulary_is_shared_out_whole(total, size, multiple):
    tokens = []
    for rank in range(size):
        with parallel(Group(rank, size)):
            share = rounded_up(total, multiple)
        assert share.count <= share.largest
        assert share.largest % multiple == 0
        assert share.begin == min(total, rank * share.largest), "logits of all ranks lie in a row"
        tokens += range(share.begin, share.begin + share.count)
    assert tokens == list(range(total))


def test_a_size_that_cannot_be_is_refused_with_those_that_can(checkpoint):
    with pytest.raises(
        ConfigError, match=r"size 3: the model's 4 attention heads .* can be: 1, 2, 4\."
    ):
        LLM(str(checkpoint("llama2-mha")), tensor_parallel_size=3, **SMALL)


def test_encoders_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="encoders run whole on one device"):
        LLM(str(save(bert(), bert_tokenizer(), tmp_path)), tensor_parallel_size=2)


def test_what_is_wrong_with_the_checkpoint_is_said_once(checkpoint, tmp_path, capfd):
    for file in checkpoint("llama3-gqa").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="is cut short"):
        LLM(str(tmp_path), tensor_parallel_size=2, **SMALL)
    assert "Traceback" not in capfd.readouterr().err


def test_a_step_that_got_no_masks_does_not_put_the_ranks_out_of_step(shared_out, monkeypatch):
    """The next request bound to a grammar gets its own masks on every rank."""
    bound = SamplingParams(
        seed=3, max_tokens=8, structured_outputs=StructuredOutputsParams(regex="[ab]{6}")
    )
    prompt = {"prompt_token_ids": [5, 6, 7]}
    llm = shared_out("qwen3")
    [expected] = llm.generate([prompt], bound, use_tqdm=False)
    constraints = llm._core._constraints
    masks, calls = constraints.masks, []

    def failing_once(requests):
        calls.append(requests)
        if len(calls) == 1:
            raise ValueError("no masks this time")
        return masks(requests)

    monkeypatch.setattr(constraints, "masks", failing_once)
    with pytest.raises(EngineError, match="no masks this time"):
        llm.generate([prompt], bound, use_tqdm=False)
    [again] = llm.generate([prompt], bound, use_tqdm=False)
    assert again.outputs[0].token_ids == expected.outputs[0].token_ids


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyboardInterrupt, "interrupted in the middle of a step"),
        (RuntimeError("out of luck"), "out of luck"),
    ],
)
def test_after_an_interrupt_or_an_error_in_a_step_no_other_is_run(
    shared_out, monkeypatch, error, said
):
    """The other ranks may be anywhere; their sums would be of different steps."""
    llm = shared_out("gpt2")
    worker = llm._core.executor._worker

    def interrupted(step):
        raise error

    monkeypatch.setattr(worker, "execute", interrupted)
    prompt, params = {"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=3)
    with pytest.raises((KeyboardInterrupt, WorkersLostError)):
        llm.generate([prompt], params, use_tqdm=False)
    monkeypatch.undo()
    with pytest.raises(WorkersLostError, match=said):
        llm.generate([prompt], params, use_tqdm=False)
    llm.shutdown()  # and again at the end: the second does nothing


class AsOnAGpu:
    """Workers of a CPU that end as a GPU's do; how often its memory was given back."""

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
        """Here nothing more."""


def test_a_gpus_memory_is_given_back_unless_a_step_may_never_end_there(shared_out, monkeypatch):
    """To give it back waits for what is under way."""
    gpu = AsOnAGpu(monkeypatch)
    shared_out("gpt2").shutdown()
    assert gpu.count == 1

    llm = shared_out("gpt2")
    monkeypatch.setattr(llm._core.executor._worker, "execute", lambda step: 1 / 0)
    with pytest.raises(WorkersLostError):
        llm.generate([{"prompt_token_ids": [5]}], SamplingParams(max_tokens=3), use_tqdm=False)
    llm.shutdown()
    assert gpu.count == 1

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "after_start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        shared_out("gpt2")
    assert gpu.count == 1


def test_a_second_model_over_ranks_is_refused_in_words(shared_out):
    shared_out("gpt2")
    with pytest.raises(ConfigError, match="a rank of another model already"):
        shared_out("gpt2")


def test_a_rank_that_stops_is_named_and_ends_the_step_offline_too(shared_out):
    llm = shared_out("gpt2", worker_timeout=4.0)
    [rank] = [
        child for child in psutil.Process().children() if "toolkit.executor.rank" in child.cmdline()
    ]
    rank.suspend()
    with pytest.raises(WorkersLostError, match="rank 1 has not finished step"):
        llm.generate([{"prompt_token_ids": [5] * 20}], SamplingParams(max_tokens=3), use_tqdm=False)
    llm.shutdown()
    assert not rank.is_running()
