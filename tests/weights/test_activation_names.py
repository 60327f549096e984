"""Names of activation functions in config.json."""

from __future__ import annotations

import torch

from toolkit.kernels import reference
from toolkit.weights.activation import KINDS, activation_kind


def test_names_mean_what_transformers_means():
    from transformers.activations import ACT2FN

    x = torch.linspace(-8, 8, 101)
    names = [name for name in KINDS if name in ACT2FN]
    assert len(names) > 5
    for name in names:
        ours = reference.ACTIVATIONS[activation_kind(name)](x)
        torch.testing.assert_close(
            ours, ACT2FN[name](x), msg=lambda text, name=name: f"{name}: {text}"
        )
