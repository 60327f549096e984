"""LoRA adapters on a GPU, with CUDA graphs (`make test-gpu`).

The reference is Transformers' model in fp32 with the adapters merged into its weights."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests import engines
from tests.distributed.test_tensor_parallel_gpu import in_a_process
from toolkit import LLM, LoRARequest, SamplingParams
from toolkit.lora.files import find_adapter
from toolkit.worker.graph_policy import StepShape

pytestmark = pytest.mark.gpu

VOCABULARY = 1500
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "initializer_range": 0.05,
}
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ENDS = ("embed_tokens", "lm_head", "up_proj")
ADAPTERS = {
    "all": (ALL, 16),
    "attention": (("q_proj", "v_proj"), 8),
    "large": (ALL, 40),
    "ends": (ENDS, 8),
}
"""Adapted projections and rank of each adapter."""
ALPHA = 32
NAMES = ["", *ADAPTERS]
COUNT = 12
ROOM = {"num_gpu_blocks_override": 1024, "max_model_len": 1024, "enable_prefix_caching": False}


class Models:
    """A base model and its adapters, on disk and in fp32."""

    def __init__(self, folder: Path) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(**CONFIG)
        base = LlamaForCausalLM(config).eval()
        self.folder = folder / "base"
        base.save_pretrained(self.folder)
        self.adapters = {name: folder / name for name in ADAPTERS}
        self._models = {"": base}
        for name, (projections, rank) in ADAPTERS.items():
            model = LlamaForCausalLM(config).eval()
            model.load_state_dict(base.state_dict())
            self._models[name] = model
            save_adapter(model, projections, rank, self.adapters[name])

    @torch.inference_mode()
    def logprobs(self, name: str, prompt: list[int], output: list[int]) -> torch.Tensor:
        """Return the log-probabilities of an answer's tokens with an adapter."""
        logits = self._models[name](torch.tensor([prompt + output])).logits[0]
        positions = torch.arange(len(prompt) - 1, len(prompt) + len(output) - 1)
        return logits.log_softmax(-1)[positions, torch.tensor(output)]


def save_adapter(
    model: torch.nn.Module, projections: tuple[str, ...], rank: int, folder: Path
) -> None:
    """Write a random adapter, and add it to the model's weights."""
    tensors = {}
    for name, module in model.named_modules():
        if name.endswith(projections):
            rows, columns = module.weight.shape
            is_table = isinstance(module, torch.nn.Embedding)
            if is_table:  # its factors are those of a product with one-hot rows
                rows, columns = columns, rows
            low = torch.randn(rank, columns) * (0.05 if is_table else columns**-0.5)
            up = torch.randn(rows, rank) * 0.6 / ALPHA * rank**0.5
            kinds = "lora_embedding_A", "lora_embedding_B"
            kinds = kinds if is_table else ("lora_A.weight", "lora_B.weight")
            for kind, factors in zip(kinds, (low, up), strict=True):
                tensors[f"base_model.model.{name}.{kind}"] = factors
            change = up @ low * (ALPHA / rank)
            module.weight.data += change.T if is_table else change
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def make_engine(models: Models, *, has_adapters: bool = True, **settings: object) -> LLM:
    modules = [f"{name}={folder}" for name, folder in models.adapters.items()]
    return LLM(
        str(models.folder),
        lora_modules=modules if has_adapters else [],
        **{"dtype": "bfloat16"} | ROOM | settings,
    )


def make_prompts(number: int) -> list[list[int]]:
    """Return prompts of 2 to 130 tokens."""
    return [
        [(7 * i + 13 * j + j * j) % VOCABULARY for j in range(2 + 37 * i % 129)]
        for i in range(number)
    ]


def answer(
    llm: LLM, prompts: list[list[int]], names: list[str]
) -> list[tuple[list[int], list[float]]]:
    """Return the tokens and log-probabilities of greedy answers."""
    params = SamplingParams(
        temperature=0.0, max_tokens=COUNT, ignore_eos=True, logprobs=0, detokenize=False
    )
    results = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        params,
        use_tqdm=False,
        lora_request=[LoRARequest(name) if name else None for name in names],
    )
    outputs = [result.outputs[0] for result in results]
    return [
        (
            list(one.token_ids),
            [
                chances[token].logprob
                for token, chances in zip(one.token_ids, one.logprobs, strict=True)
            ],
        )
        for one in outputs
    ]


def errors(
    models: Models, prompts: list[list[int]], names: list[str], answers: list
) -> torch.Tensor:
    """Return the mean error of each answer's log-probabilities."""
    found = []
    for prompt, name, (output, logprobs) in zip(prompts, names, answers, strict=True):
        expected = models.logprobs(name, prompt, output)
        found.append((expected - torch.tensor(logprobs)).abs().mean())
    return torch.stack(found)


CASES: dict[str, tuple[dict[str, object], float]] = {
    "bfloat16": ({}, 0.06),
    "float16": ({"dtype": "float16"}, 0.02),
    "float32": ({"dtype": "float32"}, 0.01),
    "eager": ({"enforce_eager": True}, 0.06),
    "chunks": ({"max_num_batched_tokens": 48, "max_num_seqs": 24}, 0.06),
    "one at a time": ({"max_num_seqs": 1}, 0.06),
    "fp8 cache": ({"kv_cache_dtype": "fp8"}, 0.3),
    "few": ({"max_num_seqs": 6}, 0.06),
    "fp8": ({"quantization": "fp8"}, 0.4),
    "int4": ({"quantization": "int4"}, 1.2),
}
"""Settings, and the greatest mean error of an answer's log-probabilities."""
CASES_OF_TWO: dict[str, tuple[dict[str, object], float]] = {
    "parts": ({"tensor_parallel_size": 2}, 0.06),
    "fp8": ({"tensor_parallel_size": 2, "quantization": "fp8"}, 0.4),
    "int4": ({"tensor_parallel_size": 2, "quantization": "int4"}, 1.2),
    "stages": ({"pipeline_parallel_size": 2}, 0.06),
}
"""Settings of two GPUs, and that error."""


@pytest.mark.parametrize("case", CASES)
def test_mixed_batches_answer_as_the_merged_models(models, case):
    settings, most = CASES[case]
    llm = make_engine(models, **settings)
    number = len(NAMES) if settings.get("max_num_seqs") == 1 else 40
    prompts = make_prompts(number)
    names = [NAMES[i % len(NAMES)] for i in range(number)]
    answers = answer(llm, prompts, names)
    graphs = engines.graphs(llm)
    llm.shutdown()
    assert {shape.is_adapted for shape in graphs} == (set() if case == "eager" else {True, False})
    require_own_answers(models, prompts, names, answers, most)


def require_own_answers(
    models: Models, prompts: list[list[int]], names: list[str], answers: list, most: float
) -> None:
    """Fail unless the errors are below `most`, and greater with any other adapter."""
    found = errors(models, prompts, names, answers)
    other = errors(models, prompts, names[1:] + names[:1], answers)
    print(f"errors {found.mean():.4f}, at most {found.max():.4f}; others {other.min():.2f}")
    assert found.max() < most
    assert other.min() > found.max(), "each adapter changes the answers by more than the errors"


def answers_of_two(models: Models, settings: dict, prompts: list[list[int]], names: list) -> list:
    llm = make_engine(models, **settings)
    answers = answer(llm, prompts, names)
    llm.shutdown()
    return answers


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("case", CASES_OF_TWO)
def test_two_gpus_answer_as_the_merged_models(models, case):
    settings, most = CASES_OF_TWO[case]
    prompts = make_prompts(40)
    names = [NAMES[i % len(NAMES)] for i in range(40)]
    answers = in_a_process(answers_of_two, models, settings, prompts, names)
    require_own_answers(models, prompts, names, answers, most)


def test_unused_adapters_change_no_bit(models):
    prompts, answers = make_prompts(30), []
    for has_adapters in (False, True):
        llm = make_engine(models, has_adapters=has_adapters, async_scheduling=False)
        answers.append(answer(llm, prompts, [""] * len(prompts)))
        if has_adapters:
            mixed = answer(llm, prompts, [NAMES[i % len(NAMES)] for i in range(len(prompts))])
            answers.append(answer(llm, prompts, [""] * len(prompts)))
        llm.shutdown()
    assert answers[0] == answers[1] == answers[2]
    assert mixed != answers[0]


@pytest.mark.parametrize(
    "settings", [{}, {"quantization": "fp8"}, {"quantization": "int4"}], ids=str
)
def test_results_are_bitwise_equal_without_early_launch(models, monkeypatch, settings):
    """Otherwise a kernel reads something before it is written."""
    from toolkit.kernels.triton import pdl

    def answers(repeats: int) -> list:
        llm = make_engine(models, async_scheduling=False, max_num_seqs=48, **settings)
        found = []
        for _ in range(repeats):
            results = []
            for number in (1, 3, 12, 40, 60):
                names = [NAMES[(i + 1) % len(NAMES)] for i in range(number)]
                results += answer(llm, make_prompts(number), names)
            found.append(results)
        llm.shutdown()
        return found

    early = answers(3)
    monkeypatch.setenv(pdl.VARIABLE, "0")
    pdl.supported.cache_clear()
    try:
        (late,) = answers(1)
    finally:
        pdl.supported.cache_clear()
    assert all(found == late for found in early)


def test_a_replaced_adapter_answers_from_the_next_step_on(models):
    llm = make_engine(models)
    prompts = make_prompts(5)
    before = answer(llm, prompts, ["all"] * 5)
    worker = engines.worker(llm)
    adapters = worker.runner.adapters
    for name in ("large", "attention", "all"):
        adapter = find_adapter(name, models.adapters[name])
        adapters.read(adapter)
        with worker.on_stream(), torch.inference_mode():
            adapters.place(1, adapter.key)
        answers = answer(llm, prompts, ["all"] * 5)
        assert errors(models, prompts, [name] * 5, answers).max() < 0.06
    llm.shutdown()
    assert answers == before


@pytest.mark.alone
@pytest.mark.parametrize(
    "settings",
    [{}, {"quantization": "fp8"}, {"quantization": "int4"}, {"enforce_eager": True}],
    ids=str,
)
def test_no_step_with_adapters_compiles(
    models: Models, settings: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    llm = make_engine(models, max_num_seqs=96, **settings)
    worker = engines.worker(llm)
    runner, longest = worker.runner, worker.info.max_model_len
    shapes = [StepShape(n, n, 1, longest, is_adapted=True) for n in range(1, 97)]
    shapes += [
        StepShape(tokens, n, tokens - n + 1, longest, is_adapted=True)
        for tokens in (*range(2, 70), 100, 200, 257, 513, 1000, 2500)
        for n in {1, 2, 9, 17, 33, 64, 70, 96, tokens - 1}
        if n <= min(96, tokens - 1) and tokens <= n * longest
    ]
    with caplog.at_level(logging.WARNING), torch.inference_mode(), worker.on_stream():
        runner.rehearse(shapes)
        torch.cuda.synchronize()
    rehearsed = runner.num_compiled()
    counts: list[int] = []
    take: Callable[[], int] = runner.num_compiled
    runner.num_compiled = lambda: (counts.append(count := take()), count)[1]
    with caplog.at_level(logging.WARNING):
        for number in (1, 5, 40):
            answer(llm, make_prompts(number), [NAMES[i % len(NAMES)] for i in range(number)])
    llm.shutdown()
    assert counts, "steps have run"
    assert (rehearsed, sum(counts)) == (0, 0), caplog.text
