"""Names of activation functions in config.json."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

from toolkit.kernels import reference
from toolkit.weights.activation import KINDS, activation_kind


@pytest.mark.parametrize("name", [name for name in KINDS if name in ACT2FN])
def test_names_mean_what_transformers_means(name):
    x = torch.linspace(-8, 8, 101)
    torch.testing.assert_close(reference.ACTIVATIONS[activation_kind(name)](x), ACT2FN[name](x))
