"""Quantized checkpoints with experts, on a CPU."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

from tests import checkpoints
from tests.checkpoints import generate
from toolkit import LLM
from toolkit.config import EngineConfig
from toolkit.verify import transformers_model
from toolkit.verify.prompts import Question

pytestmark = pytest.mark.usefixtures("forked_processes")

BLOCK = 128


def in_blocks(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a weight in FP8, the scales of its blocks, and what both are in fp32."""
    rows, columns = weight.shape
    padded = pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    cut = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scales = cut.abs().amax((1, 3)) / 448
    each = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
    values = (weight / each).to(torch.float8_e4m3fn)
    return values, scales, values.float() * each


@pytest.mark.parametrize(
    ("name", "sizes", "skipped"),
    [
        ("mixtral", {}, ["self_attn", "gate", "embed_tokens", "lm_head"]),
        (  # as published: attention too
            "minimax-m2",
            {"hidden_size": 192, "intermediate_size": 160, "head_dim": 128},
            ["gate", "e_score_correction_bias", "lm_head"],
        ),
    ],
)
def test_experts_in_blocks_of_fp8_equal_the_dequantized_model(tmp_path, name, sizes, skipped):
    family, settings = checkpoints.ARCHITECTURES[name]
    model = checkpoints.make_model(family, settings | sizes | {"num_local_experts": 6})
    folder = checkpoints.save(model, tmp_path)
    file = folder / "model.safetensors"
    tensors, rounded = {}, {}
    for tensor, weight in load_file(file).items():
        tensors[tensor] = rounded[tensor] = weight
        is_kept = any(f".{part}." in f".{tensor}" for part in (*skipped, "embed_tokens"))
        if weight.dim() == 2 and not is_kept:
            tensors[tensor], scales, rounded[tensor] = in_blocks(weight)
            tensors[f"{tensor}_scale_inv"] = scales
    save_file(rounded, file, metadata={"format": "pt"})
    reference = type(model.module).from_pretrained(folder, attn_implementation="eager").eval()
    save_file(tensors, file)
    quantization = {
        "quant_method": "fp8",
        "fmt": "float8_e4m3fn",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": skipped,
    }
    checkpoints.edit_json(folder / "config.json", quantization_config=quantization)
    prompts = [[5, 6, 7, 100, 32], [9, 8]]
    expected = [checkpoints.greedy(reference, prompt, 12) for prompt in prompts]
    both = [{}, {"tensor_parallel_size": 2, "enable_expert_parallel": True}]
    for ranks in both if name == "mixtral" else both[:1]:  # a block of attention is not cut
        llm = LLM(str(folder), device="cpu", dtype="float32", **ranks)
        found = generate(llm, prompts, max_tokens=12)
        llm.shutdown()
        assert [list(result.outputs[0].token_ids) for result in found] == expected
    # What `tk verify` compares with.
    config = EngineConfig.from_settings({"model": str(folder)})
    (scored,) = transformers_model.score(folder, config, 1, [Question(prompts[0])], 9)
    logits = checkpoints.logits(reference, prompts[0]).log_softmax(-1)
    for position, chances in scored.chances.items():
        wanted = {token: float(logits[position - 1, token]) for token in chances}
        assert chances == pytest.approx(wanted, abs=1e-4)
