"""Router and experts, the reference and Triton, against the layers of Transformers."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from toolkit.kernels import reference
from toolkit.kernels.reference import Routing, Stack

HIDDEN, SIZE = 40, 24
GROUPS = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "n_routed_experts": 20}
LAYERS = {
    "Mixtral": (
        "mixtral",
        "MixtralSparseMoeBlock",
        "MixtralConfig",
        {"num_local_experts": 8, "num_experts_per_tok": 2},
        Routing(2, renormalize=True),
    ),
    "Phi-3.5-MoE": (
        "phimoe",
        "PhimoeSparseMoeBlock",
        "PhimoeConfig",
        {"num_local_experts": 16},
        Routing(2, "sparsemixer"),
    ),
    "Qwen3": (
        "qwen3_moe",
        "Qwen3MoeSparseMoeBlock",
        "Qwen3MoeConfig",
        {"num_experts": 12, "num_experts_per_tok": 4, "norm_topk_prob": True},
        Routing(4, renormalize=True),
    ),
    "Qwen3, not normed": (
        "qwen3_moe",
        "Qwen3MoeSparseMoeBlock",
        "Qwen3MoeConfig",
        {"num_experts": 12, "num_experts_per_tok": 4, "norm_topk_prob": False},
        Routing(4),
    ),
    "DeepSeek-V2": (
        "deepseek_v2",
        "DeepseekV2Moe",
        "DeepseekV2Config",
        dict(**GROUPS, topk_method="group_limited_greedy", routed_scaling_factor=16.0),
        Routing(3, "softmax", False, 4, 2, 16.0),
    ),
    "DeepSeek-V3": (
        "deepseek_v3",
        "DeepseekV3MoE",
        "DeepseekV3Config",
        dict(**GROUPS, routed_scaling_factor=2.5, norm_topk_prob=True),
        Routing(3, "sigmoid", True, 4, 2, 2.5),
    ),
}


def layer(name: str) -> tuple[nn.Module, Routing]:
    """Return (a layer of Transformers with random parameters, its routing)."""
    family, kind, config_kind, fields, routing = LAYERS[name]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config = getattr(module, config_kind)(**fields)
    config.hidden_size = HIDDEN
    config.intermediate_size = config.moe_intermediate_size = SIZE
    config._experts_implementation = "eager"
    made = getattr(module, kind)(config).eval()
    torch.manual_seed(0)
    for parameter in [*made.parameters(), *made.buffers()]:
        nn.init.normal_(parameter, std=0.3)
    return made.requires_grad_(False), routing


def computed(module: object, made: nn.Module, routing: Routing, x: Tensor) -> Tensor:
    """Compute a layer, without shared experts, by functions of `module`."""
    gate, experts = made.router if hasattr(made, "router") else made.gate, made.experts
    logits = x @ gate.weight.T
    bias = getattr(gate, "e_score_correction_bias", None)
    ids, weights = module.route(logits, routing, bias)
    up, down = Stack(experts.gate_up_proj), Stack(experts.down_proj)
    return module.experts(x, ids, weights, up, down, "silu")


@pytest.mark.on_cpu(
    "1-Mixtral",
    "1-Qwen3, not normed",
    "1-DeepSeek-V2",
    "1-DeepSeek-V3",
    "3-Phi-3.5-MoE",
    "30-Qwen3",
)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("tokens", [1, 3, 30])
def test_layers_equal_those_of_transformers(triton, device, name, tokens):
    from toolkit.kernels.triton.experts import experts, routing

    made, how = layer(name)
    x = torch.randn(tokens, HIDDEN)
    expected = made(x[None])[0]
    if hasattr(made, "shared_experts"):
        expected = expected - made.shared_experts(x)
    assert expected.norm() > 0.1 * x.norm()
    torch.testing.assert_close(computed(reference, made, how, x), expected, rtol=1e-4, atol=1e-4)
    kernels = SimpleNamespace(
        route=routing.route,
        experts=lambda x, ids, weights, *layer: experts.Layer(*layer)(x, ids, weights),
    )
    y = computed(kernels, made.to(device), how, x.to(device))
    torch.testing.assert_close(y.cpu(), expected, rtol=1e-4, atol=1e-4)
