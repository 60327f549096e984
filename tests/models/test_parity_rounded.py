"""bfloat16 and int8 on a CPU: as close to fp32 as Transformers with the same rounding, and the
type of a checkpoint on a CPU."""

from __future__ import annotations

import random

import pytest
import torch

from tests import checkpoints
from tests.checkpoints import VOCAB
from tests.models.architectures import SHORTEST_PROMPT
from toolkit import LLM
from toolkit.kernels import cpu
from toolkit.kernels.reference import quantize_int8
from toolkit.models.build import choose_dtype, load_config

needs_kernels = pytest.mark.skipif(not cpu.available(), reason=f"the CPU kernels: {cpu.problem()}")
CPU = torch.device("cpu")
BOUND = 1.3
"""Our RMS error over that of Transformers. Measured: 0.7 to 1.02."""
NAMES = [
    *("gpt2", "llama3-gqa", "mistral-window", "qwen2", "qwen3", "gemma2", "gemma3", "phi"),
    *("gpt-neox", "olmo", "olmo2", "granite", "cohere", "cohere2", "glm4", "stablelm-parallel"),
    *("hunyuan", "ministral3", "opt", "falcon", "nemotron"),
]


def compare(
    name: str, exact: torch.nn.Module, rounded: torch.nn.Module, llm: LLM
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the errors of our log-probabilities, and of those of `rounded`."""
    rng, shortest = random.Random(name), SHORTEST_PROMPT.get(name, 1)
    ours, theirs = [], []
    for length in (7, 33, 96):
        prompt = [rng.randrange(VOCAB) for _ in range(max(length, shortest))]
        expected = checkpoints.logits(exact, prompt).log_softmax(-1)
        ours.append(checkpoints.engine_logits(llm, prompt).float().log_softmax(-1) - expected)
        theirs.append(checkpoints.logits(rounded, prompt).float().log_softmax(-1) - expected)
    assert checkpoints.records_steps(llm)
    llm.shutdown()
    return torch.cat(ours), torch.cat(theirs)


def rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())


@needs_kernels
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_is_as_close_to_fp32_as_transformers(checkpoint, tmp_path, name):
    checkpoint(name)
    rounded, exact = checkpoints.make_reference(name).bfloat16(), checkpoints.make_reference(name)
    exact.load_state_dict({key: value.float() for key, value in rounded.state_dict().items()})
    folder = checkpoints.save(rounded, tmp_path)
    llm = LLM(str(folder), device="cpu", kv_cache_memory=0.05, max_num_seqs=4)
    assert llm.info.dtype == "bfloat16"
    ours, theirs = compare(name, exact, rounded, llm)
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
    settings = {"device": "cpu", "kv_cache_memory": 0.05, "max_num_seqs": 4}
    llm = LLM(str(checkpoint(name)), quantization="int8", **settings)
    rounded, exact = checkpoints.make_reference(name), checkpoints.make_reference(name)
    quantize_linear_layers(rounded)
    ours, theirs = compare(name, exact, rounded, llm)
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
