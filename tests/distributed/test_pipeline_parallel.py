"""Pipeline parallelism on CPUs, over gloo: equal to one process and to Transformers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests import checkpoints
from tests.checkpoints import VOCAB
from tests.distributed.test_tensor_parallel import check_tokens_and_logprobs
from tests.pooling.folders import bert, bert_tokenizer, save
from toolkit import LLM, SamplingParams, StructuredOutputsParams
from toolkit.config import EngineConfig
from toolkit.distributed import SINGLE, Stage, parallel
from toolkit.engine.core import EngineCore
from toolkit.engine.messages import EngineRequest
from toolkit.errors import CheckpointError, ConfigError
from toolkit.executor import Pending
from toolkit.models.build import build_model, load_config
from toolkit.models.model import Model
from toolkit.models.pipeline_split import split_layers
from toolkit.scheduler import ModelOutput, Request, SchedulerOutput
from toolkit.scheduler.running import RunningRequests
from toolkit.scheduler.step import StepBuilder
from toolkit.sequence import SequenceSpec
from toolkit.weights.loading.loader import load_weights
from tools.bench.loop import RandomTokens

pytestmark = pytest.mark.usefixtures("forked_processes")

SMALL = {"num_threads": 1, "num_gpu_blocks_override": 200, "block_size": 4, "max_num_seqs": 8}
NEW_TOKENS = 12
Checkpoint = Callable[[str], Path]


def prompts_for(name: str) -> list[list[int]]:
    rng = random.Random(name)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in (1, 17, 40, 5)]


@pytest.fixture
def load() -> Iterator[Callable[..., LLM]]:
    """Loader of models over ranks, which end with the test."""
    loaded: list[LLM] = []

    def make(folder: Path, **settings: object) -> LLM:
        loaded.append(LLM(str(folder), **SMALL | settings))
        return loaded[-1]

    yield make
    for llm in loaded:
        llm.shutdown()


@pytest.mark.parametrize(
    ("name", "tensor", "stages"),
    [
        *[("gpt2", 2, 2), ("gemma4", 2, 2), ("cohere2", 1, 2)],
        *[("qwen2-tied-some-windows", 1, 3), ("qwen3-moe", 1, 2), ("llama4", 2, 2)],
    ],
)
def test_greedy_tokens_and_logprobs_equal_transformers(
    load: Callable[..., LLM], checkpoint: Checkpoint, name: str, tensor: int, stages: int
) -> None:
    """Chunks of a prompt follow each other through the stages.

    The models differ in what crosses ranks and stages: positions and tied tables, norms after
    branches, branches in parallel, windows by layer, layers that share memory, and experts."""
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages}
    llm = load(checkpoint(name), max_num_batched_tokens=24, **sizes)
    check_tokens_and_logprobs(llm, name, prompts_for(name), NEW_TOKENS)


def test_all_kinds_of_sampling_and_embeddings_equal_one_process(
    load: Callable[..., LLM], checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few blocks: requests are preempted with a token in flight, and swapped on every stage."""
    preempted = []
    preempt = RunningRequests.preempt

    def counted(self: RunningRequests, request: Request, step: StepBuilder | None = None) -> None:
        preempted.append(request.num_in_flight)
        preempt(self, request, step)

    monkeypatch.setattr(RunningRequests, "preempt", counted)
    kinds = [
        SamplingParams(temperature=0.9, seed=1, max_tokens=20, ignore_eos=True, n=2),
        SamplingParams(
            temperature=0.8, seed=2, top_p=0.8, max_tokens=40, ignore_eos=True, logprobs=2
        ),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=40, ignore_eos=True),
        SamplingParams(
            seed=3, max_tokens=12, structured_outputs=StructuredOutputsParams(regex="[ab]{9}")
        ),
        SamplingParams(
            temperature=0.0, max_tokens=20, ignore_eos=True, extra_args={"no_repeat": 20}
        ),
    ]
    prompts = [{"prompt_token_ids": p} for p in [*prompts_for("sampling"), [7, 8]] * 2]
    found, vectors = [], []
    for stages in (1, 2):
        tight = {
            "num_gpu_blocks_override": 30,
            "max_model_len": 100,
            "swap_space": 0.001,
            "pooling": "mean",
            "logits_processors": ["tests.inside.plugged:NoRepeat"],
        }
        llm = load(checkpoint("qwen3"), pipeline_parallel_size=stages, **tight)
        results = llm.generate(prompts, kinds * 2, use_tqdm=False)
        found.append([[list(answer.token_ids) for answer in result.outputs] for result in results])
        vectors.append([one.outputs.embedding for one in llm.embed(prompts_for("texts"))])
    assert found[0] == found[1]
    assert torch.allclose(*map(torch.tensor, vectors), atol=1e-5)
    assert any(preempted), "one had a token in flight"


def test_a_tied_table_is_quantized_on_the_first_stage(
    load: Callable[..., LLM], checkpoint: Checkpoint
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=1)
    prompts = [{"prompt_token_ids": prompt} for prompt in prompts_for("int8")]
    found = []
    for stages in (1, 2):
        llm = load(checkpoint("qwen3-tied"), quantization="int8", pipeline_parallel_size=stages)
        assert (
            llm.info.model_parameters == checkpoints.make_reference("qwen3-tied").num_parameters()
        )
        results = llm.generate(prompts, params, use_tqdm=False)
        found.append([(one.outputs[0].token_ids, one.prompt_logprobs) for one in results])
    assert found[0] == found[1]


def all_names(folder: Path) -> list[str]:
    return list(build(folder, Stage()).slots())


def build(folder: Path, stage: Stage) -> Model:
    with parallel(SINGLE, stage):
        return build_model(
            load_config(folder),
            device=torch.device("cpu"),
            dtype=torch.float32,
            max_model_len=8,
        )


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("gpt2", 2),
        ("gpt2-untied-inverse-scale", 3),
        *((name, 2) for name in ("llama3-gqa", "mistral-window", "qwen3-tied", "olmo2")),
        ("qwen2-tied-some-windows", 3),
    ],
)
def test_stages_partition_the_checkpoint_but_for_a_tied_table(
    checkpoint: Checkpoint, name: str, stages: int
) -> None:
    folder, expected = checkpoint(name), checkpoints.make_reference(name).tensors()
    held: dict[str, list[int]] = {}
    for index in range(stages):
        model = build(folder, Stage(index, stages))
        load_weights(model, folder, "auto", elsewhere=all_names(folder))
        for tensor, slot in model.slots().items():
            held.setdefault(tensor, []).append(index)
            for part in slot.parts:
                region = tuple(slice(s.begin, s.begin + s.count) for s in part.region)
                assert torch.equal(
                    part.target.T if part.transpose else part.target, expected[tensor][region]
                )
    tied = load_config(folder).tie_word_embeddings
    for tensor, stages_with in held.items():
        is_table = tensor.endswith(("embed_tokens.weight", "wte.weight"))
        only = [0, stages - 1] if is_table and tied else stages_with[:1]
        assert stages_with == only, tensor
    assert held.keys() == set(all_names(folder))


def test_an_unknown_tensor_is_refused_on_each_stage(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = checkpoint("llama3-gqa")
    tensors = checkpoints.make_reference("llama3-gqa").tensors()
    torch.save(
        tensors | {"model.layers.7.odd.weight": torch.zeros(1)}, tmp_path / "pytorch_model.bin"
    )
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    for index in range(2):
        with pytest.raises(
            CheckpointError, match=r"layers\.7\.odd\.weight that LlamaForCausalLM does not have"
        ):
            load_weights(
                build(tmp_path, Stage(index, 2)), tmp_path, "auto", elsewhere=all_names(tmp_path)
            )


@pytest.mark.parametrize("num_sharing", [1, 3])
@pytest.mark.parametrize(("layer", "head"), [(1, 0), (10, 25), (7, 100), (5, 5)])
@pytest.mark.parametrize("total", [4, 9, 12])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_no_other_split_has_a_faster_slowest_stage(
    total: int, stages: int, layer: int, head: int, num_sharing: int
) -> None:
    def slowest(counts: list[int]) -> int:
        return max(n * layer + head * (i == stages - 1) for i, n in enumerate(counts))

    splits = [
        list(counts)
        for counts in itertools.product(range(1, total + 1), repeat=stages)
        if sum(counts) == total and counts[-1] >= num_sharing
    ]
    if not splits:
        with pytest.raises(ConfigError, match=f"the last {num_sharing} of which share memory"):
            split_layers(total, stages, layer, head, num_sharing)
        return
    found = split_layers(total, stages, layer, head, num_sharing)
    assert found in splits
    assert slowest(found) == min(map(slowest, splits))


def test_more_stages_than_layers_are_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match=r"size 3: the model has 2 layers, .* Use 1 to 2\."):
        LLM(str(checkpoint("gpt2")), pipeline_parallel_size=3, **SMALL)


def test_encoders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pipeline-parallel-size 2: encoders run on one device"):
        LLM(str(save(bert(), bert_tokenizer(), tmp_path)), pipeline_parallel_size=2)


class Watched(RandomTokens):
    """Records the running requests whenever a step's result is awaited."""

    def __init__(self) -> None:
        super().__init__(16)
        self.in_flight: list[SchedulerOutput] = []
        self.seen: list[list[set[int]]] = []

    def execute(self, step: SchedulerOutput) -> Pending:
        self.in_flight.append(step)
        pending = super().execute(step)
        known = pending.result

        def result() -> ModelOutput:
            self.seen.append([set(step.rows.tolist()) for step in self.in_flight])
            self.in_flight.remove(step)
            return known()

        pending.result = result  # type: ignore[method-assign]  # observes
        return pending


@pytest.mark.parametrize("stages", [2, 3])
def test_each_stage_has_a_step_and_no_request_is_in_two(stages: int) -> None:
    executor = Watched()
    core = EngineCore(EngineConfig.from_settings({"pipeline_parallel_size": stages}), executor)
    for number in range(6):
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        core.add(
            EngineRequest(
                id=str(number),
                number=number,
                spec=SequenceSpec(
                    prompt_token_ids=[5, 6, 7], params=params, max_tokens=20, eos_token_ids=[]
                ),
            )
        )
    while core.has_work:
        core.step()
    assert len(executor.seen) == 20 * stages
    for running in executor.seen[: 19 * stages]:
        assert len(running) == stages
        assert [len(rows) for rows in running] == [6 // stages] * stages
        assert len(set.union(*running)) == 6
