"""Decoders with delta nets in GPTQ and AWQ, as published: some projections are not quantized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import checkpoints
from tests.checkpoints import generate
from tests.models.architectures import ARCHITECTURES
from toolkit import LLM
from toolkit.kernels.switch import only_pytorch

pytestmark = pytest.mark.usefixtures("forked_processes")

GROUP = 32
COUNT = 6  # tokens of an answer
PROMPTS = [[5, 6, 7, 100, 32], [9, 8]]
SIZES = {
    "intermediate_size": 64,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_value_heads": 4,
}
EXPERTS = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
CHANGES = {
    "qwen3-next": SIZES | EXPERTS | {"mlp_only_layers": []},
    "qwen3.5": SIZES,
    "qwen3.5-moe": SIZES | EXPERTS,
}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Quantized = tuple[dict[str, Tensor], Tensor]
"""Tensors of a projection by the ends of their names, and the weight that they are."""


def words(values: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Pack integers of 4 bits [n, m] in int32 words [n, m / 8]. order: from the lowest bits on."""
    eights = values.long().unflatten(1, (-1, 8))[..., list(order)]
    packed = (eights << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(packed < 2**31, packed, packed - 2**32).int()


def gptq(weight: Tensor, *, has_order: bool = False) -> Quantized:
    """Round a weight to symmetric integers. `has_order`: neighbors are of different groups."""
    columns = torch.arange(weight.shape[1])
    groups = columns % (len(columns) // GROUP) if has_order else columns // GROUP
    together = weight[:, torch.argsort(groups, stable=True)].unflatten(1, (-1, GROUP))
    scales = (together.abs().amax(2) / 7).half()
    values = (weight / scales.float()[:, groups]).round().clamp(-8, 7)
    stored = {
        "qweight": words(values + 8).T,
        "qzeros": words(torch.full(scales.T.shape, 7)),  # the zero point less one
        "scales": scales.T,
        "g_idx": groups.int(),
    }
    return stored, values * scales.float()[:, groups]


def act_order(weight: Tensor) -> Quantized:
    return gptq(weight, has_order=True)


def awq(weight: Tensor) -> Quantized:
    grouped = weight.unflatten(1, (-1, GROUP))
    least, greatest = grouped.amin(2), grouped.amax(2)
    scales = ((greatest - least) / 15).half()
    zeros = (-least / scales).round().clamp(0, 15)
    scale, zero = (part.float().repeat_interleave(GROUP, 1) for part in (scales, zeros))
    values = (weight / scale + zero).round().clamp(0, 15)
    stored = {
        "qweight": words(values.T, AWQ_ORDER),
        "qzeros": words(zeros.T, AWQ_ORDER),
        "scales": scales.T,
    }
    return stored, (values - zero) * scale


QUANTIZE: dict[str, Callable[[Tensor], Quantized]] = {
    "gptq": gptq,
    "act-order": act_order,
    "awq": awq,
}
IN_FULL = ("in_proj_ba", "in_proj_b.", "in_proj_a.", "mlp.gate.", "shared_expert_gate", "embed_tok")
PUBLISHED = {
    "lm_head": {},
    "model.language_model.embed_tokens": {},
    "-:.*attn.*": {},
    "-:.*shared_expert.*": {},
    "-:.*mtp.*": {},
    "-:.*visual.*": {},
}
"""Rules of Qwen/Qwen3.5-35B-A3B-GPTQ-Int4."""
CASES: list[tuple[str, str, dict[str, Any], tuple[str, ...]]] = [
    ("qwen3-next", "gptq", {}, ()),  # no rules: the tensors say what is quantized
    ("qwen3-next", "awq", {"modules_to_not_convert": ["in_proj_ba", "mlp.gate", "shared"]}, ()),
    ("qwen3.5", "act-order", {"dynamic": {r"-:.*\.in_proj_[ab]$": {}}, "desc_act": True}, ()),
    ("qwen3.5", "awq", {"modules_to_not_convert": ["in_proj_a", "in_proj_b", "gate"]}, ()),
    ("qwen3.5-moe", "gptq", {"dynamic": PUBLISHED}, ("attn", "shared_expert")),
]
"""Row of ARCHITECTURES, format, fields of quantization_config, other names in full precision."""


@pytest.mark.parametrize(
    ("name", "kind", "fields", "others"), CASES, ids=lambda one: one if isinstance(one, str) else ""
)
def test_quantized_hybrid_answers_as_the_dequantized_model(tmp_path, name, kind, fields, others):
    family, settings = ARCHITECTURES[name]
    model = checkpoints.make_model(family, settings | CHANGES[name])
    folder = checkpoints.save(model, tmp_path)
    file = folder / "model.safetensors"
    tensors, rounded = {}, {}
    for tensor, weight in load_file(file).items():
        tensors[tensor] = rounded[tensor] = weight
        in_full = any(part in tensor for part in (*IN_FULL, "lm_head", *others))
        if weight.dim() == 2 and not in_full:
            del tensors[tensor]
            stored, rounded[tensor] = QUANTIZE[kind](weight)
            module = tensor.removesuffix(".weight")
            tensors |= {f"{module}.{end}": one.contiguous() for end, one in stored.items()}
    save_file(rounded, file, metadata={"format": "pt"})
    reference = type(model.module).from_pretrained(folder, attn_implementation="eager").eval()
    expected = [checkpoints.greedy(reference, prompt, COUNT) for prompt in PROMPTS]
    if fields.get("dynamic") is PUBLISHED:
        tensors = {
            name.replace("model.", "model.language_model."): tensors[name] for name in tensors
        }
    save_file(tensors, file)
    method = {"quant_method": "awq" if kind == "awq" else "gptq", "bits": 4, "group_size": GROUP}
    checkpoints.edit_json(folder / "config.json", quantization_config=method | fields)
    for ranks in (1, 2) if name != "qwen3.5-moe" else (1,):
        with only_pytorch("dequantized"):  # the kernels round x to 8 bits
            options = {"num_threads": 1, "tensor_parallel_size": ranks}
            llm = LLM(str(folder), device="cpu", dtype="float32", **options)
            found = generate(llm, PROMPTS, max_tokens=COUNT)
            llm.shutdown()
        assert [list(result.outputs[0].token_ids) for result in found] == expected
