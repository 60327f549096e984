"""The experts that decode steps of a model read, as `tools.bench.experts --model` counts them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from toolkit.kernels.reference import Routing
from toolkit.layers import Router
from toolkit.weights.source import Source
from tools.bench import chosen_experts


def test_distinct_experts_of_full_decode_steps_are_counted():
    prompt = torch.tensor([[0, 1], [2, 3], [4, 5]])
    steps = [torch.tensor(ids) for ids in ([[0, 1], [1, 2]], [[3, 0], [0, 3]], [[5, 1]])]
    padded = torch.tensor([[4, 5], [-1, -1], [2, -1]])
    assert chosen_experts.count_distinct([prompt, *steps, padded], 2) == [3, 2, 3]
    assert chosen_experts.count_distinct([prompt, *steps, padded], 1) == [2]


def test_choices_are_those_of_the_router():
    router = Router(8, 5, Source("router"), Routing(2), None, None)
    nn.init.normal_(router.logits.weight.values)
    x, slots = torch.randn(6, 8), torch.tensor([0, 1, 2, -1, 4, 5])
    with chosen_experts.recorded_choices() as choices:
        ids, _ = router(x, slots)
        router(x[:1], slots[:1])
    router(x, slots)
    assert list(choices) == [router]
    first, second = choices[router]
    assert torch.equal(first, ids)
    assert second.shape == (1, 2)


def test_experts_of_a_model_are_counted(checkpoint):
    counted = chosen_experts.chosen_experts(checkpoint("qwen3-moe"), [1, 4], device="cpu")
    single, several = counted[1], counted[4]
    assert len(single) == len(several) > 0
    num_chosen = {count for _, count in single}
    assert len(num_chosen) == 1, "one token reads as many as are chosen"
    for (steps, count), (more_steps, most) in zip(single, several, strict=True):
        assert steps >= chosen_experts.NEW_TOKENS - 1
        assert more_steps >= chosen_experts.NEW_TOKENS - 1
        assert count < most <= 4 * count


def test_a_model_without_experts_is_an_error(checkpoint):
    with pytest.raises(ValueError, match="no router"):
        chosen_experts.chosen_experts(checkpoint("qwen3"), [1], device="cpu")
