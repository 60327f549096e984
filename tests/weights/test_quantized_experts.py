"""Quantized checkpoints with experts, on a CPU."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file, save_file

from tests import checkpoints
from tests.checkpoints import generate
from toolkit import LLM


def test_experts_in_blocks_of_fp8_equal_the_dequantized_model(tmp_path):
    family, settings = checkpoints.ARCHITECTURES["mixtral"]
    model = checkpoints.make_model(family, settings | {"num_local_experts": 6})
    folder = checkpoints.save(model, tmp_path)
    file = folder / "model.safetensors"
    tensors, rounded = {}, {}
    for name, weight in load_file(file).items():
        tensors[name] = rounded[name] = weight
        if ".experts." in name:  # smaller than a block
            scale = weight.abs().max() / 448
            tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
            tensors[name.replace(".weight", ".weight_scale_inv")] = scale.view(1, 1)
            rounded[name] = tensors[name].float() * scale
    save_file(rounded, file, metadata={"format": "pt"})
    reference = type(model).from_pretrained(folder, attn_implementation="eager").eval()
    save_file(tensors, file)
    others = {
        name.removesuffix(".weight")
        for name, weight in tensors.items()
        if weight.dim() == 2 and ".experts." not in name
    }
    config = json.loads((folder / "config.json").read_text())
    quantized = config | {
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": sorted(others),
        }
    }
    (folder / "config.json").write_text(json.dumps(quantized))
    prompts = [[5, 6, 7, 100, 32], [9, 8]]
    expected = [checkpoints.greedy(reference, prompt, 12) for prompt in prompts]
    for ranks in ({}, {"tensor_parallel_size": 2, "enable_expert_parallel": True}):
        llm = LLM(str(folder), device="cpu", dtype="float32", **ranks)
        found = generate(llm, prompts, max_tokens=12)
        llm.shutdown()
        assert [list(result.outputs[0].token_ids) for result in found] == expected
