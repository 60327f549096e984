"""bfloat16 and int8 on a CPU: as close to fp32 as Transformers with the same rounding, and the
type of a checkpoint on a CPU."""

from __future__ import annotations

import random

import pytest
import torch

from tests import checkpoints
from tests.checkpoints import VOCAB
from tests.models.architectures import SHORTEST_PROMPT
from tests.references import Reference
from toolkit import LLM
from toolkit.kernels import cpu
from toolkit.kernels.reference import quantize_int8
from toolkit.models.build import choose_dtype, load_config

needs_kernels = pytest.mark.skipif(not cpu.available(), reason=f"the CPU kernels: {cpu.problem()}")
CPU = torch.device("cpu")
LAST = slice(-8, None)
Errors = tuple[torch.Tensor, torch.Tensor]
"""Errors of our log-probabilities, and of those of Transformers with rounding."""
BOUND = 1.3
"""Our RMS error over that of Transformers. Measured: 0.7 to 1.02."""
NAMES = [
    *("gpt2", "llama3-gqa", "mistral-window", "qwen2", "qwen3", "gemma2", "gemma3", "phi"),
    *("gpt-neox", "olmo", "olmo2", "granite", "cohere", "cohere2", "glm4", "stablelm-parallel"),
    *("hunyuan", "ministral3", "opt", "falcon", "nemotron", "gemma4"),
]


def compare(name: str, exact: Reference, rounded: Reference, llm: LLM) -> Errors:
    """Compare log-probabilities at the last tokens of three prompts."""
    rng, shortest = random.Random(name), SHORTEST_PROMPT.get(name, 1)
    ours, theirs = [], []
    for length in (7, 33, 96):
        prompt = [rng.randrange(VOCAB) for _ in range(max(length, shortest))]
        expected = exact.logits(prompt, LAST).log_softmax(-1)
        found = checkpoints.engine_logits(llm, prompt)[LAST]
        ours.append(found.float().log_softmax(-1) - expected)
        theirs.append(rounded.logits(prompt, LAST).float().log_softmax(-1) - expected)
    assert checkpoints.records_steps(llm)
    llm.shutdown()
    return torch.cat(ours), torch.cat(theirs)


def rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())


def round_all(model: torch.nn.Module) -> None:
    model.bfloat16()


def round_values(model: torch.nn.Module) -> None:
    """Give parameters the values of bfloat16, in fp32."""
    kept = {name for name, _ in model.named_buffers()}
    for name, value in model.state_dict().items():
        if name not in kept:
            value.copy_(value.bfloat16())


@needs_kernels
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_is_as_close_to_fp32_as_transformers(checkpoint, name):
    plain = checkpoints.make_reference(name)
    settings = {"device": "cpu", "kv_cache_memory": 0.004, "max_num_seqs": 4}
    llm = LLM(str(checkpoint(name)), dtype="bfloat16", **settings)
    ours, theirs = compare(name, plain.changed(round_values), plain.changed(round_all), llm)
    assert 0 < rms(ours) < BOUND * rms(theirs)


def quantize_linear_layers(model: torch.nn.Module) -> None:
    """Round weights by row, and inputs by token, to int8. Products stay in fp32."""

    def rounded(rows: torch.Tensor) -> torch.Tensor:
        values, scale = quantize_int8(rows.reshape(-1, rows.shape[-1]))
        return (values.float() * scale).view_as(rows)

    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith(("Linear", "Conv1D")):
            weight = module.weight.data
            # In place: a tied table is the same parameter.
            module.weight.data = rounded(weight.T).T if kind == "Conv1D" else rounded(weight)
            module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),))


@needs_kernels
@pytest.mark.parametrize("name", NAMES)
def test_int8_equals_transformers_with_rounded_rows(checkpoint, name):
    """Exactly, until a difference in fp32 rounds to another integer."""
    settings = {"device": "cpu", "kv_cache_memory": 0.004, "max_num_seqs": 4}
    llm = LLM(str(checkpoint(name)), quantization="int8", **settings)
    exact = checkpoints.make_reference(name)
    ours, theirs = compare(name, exact, exact.changed(quantize_linear_layers), llm)
    by_token = (ours - theirs).abs().amax(1) / rms(theirs)
    assert (by_token < 1e-3).float().mean() > 0.3
    assert rms(ours - theirs) < 0.5 * rms(theirs)


@pytest.mark.parametrize(
    ("saved", "on_a_cpu", "without_kernels"),
    [
        (None, torch.float32, torch.float32),
        ("float32", torch.float32, torch.float32),
        ("float16", torch.float32, torch.float32),  # has more digits than bfloat16
        ("bfloat16", torch.bfloat16, torch.float32),
    ],
)
def test_auto_dtype_on_a_cpu_by_checkpoint_and_kernels(
    checkpoint, saved, on_a_cpu, without_kernels, monkeypatch
):
    config = load_config(checkpoint("gpt2"))
    config.dtype = saved
    monkeypatch.setattr(cpu, "available", lambda: True)
    assert choose_dtype("auto", config, CPU) == on_a_cpu
    assert choose_dtype("float32", config, CPU) == torch.float32
    monkeypatch.setattr(cpu, "available", lambda: False)
    assert choose_dtype("auto", config, CPU) == without_kernels
