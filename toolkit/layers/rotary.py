"""Rotary position embedding (Su et al., 2021), with every scaling that Transformers' Llama knows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from toolkit.errors import CheckpointError


class RotaryEmbedding(nn.Module):
    """The table of rotations: `cos_sin` [max_model_len, 2, size / 2]. Attention turns pairs (i, i + size / 2) of the first
    `size` dimensions of each head by them.

    NOTE: scalings that depend on the sequence's length (dynamic, longrope) are taken at `max_model_len`,
    once. Transformers takes them at the current length, which rotates keys already in the cache by angles
    that no longer fit; the two agree as long as `max_model_len` is within the length the model was first
    trained for.
    """

    cos_sin: torch.Tensor

    def __init__(self, config: Any, head_size: int, max_model_len: int) -> None:
        super().__init__()
        inv_freq, scaling = inverse_frequencies(config, head_size, max_model_len)
        positions = torch.arange(max_model_len, dtype=torch.float32, device=inv_freq.device)
        angles = torch.outer(positions, inv_freq)
        table = torch.stack((angles.cos(), angles.sin()), dim=1) * scaling
        self.register_buffer("cos_sin", table.to(torch.get_default_dtype()), persistent=False)


def inverse_frequencies(config: Any, head_size: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    """(inverse frequencies [size / 2] in fp32, factor on cosines and sines) as the config's `rope_parameters`
    say.
    """
    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        size = int(head_size * parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
        return 1.0 / parameters["rope_theta"] ** exponents, 1.0

    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind not in ROPE_INIT_FUNCTIONS:
        known = ", ".join(["default", *ROPE_INIT_FUNCTIONS])
        raise CheckpointError(f"The model's rope_type {kind!r} is not supported; these are: {known}.")
    with torch.device("cpu"):
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=max_model_len)
    device = torch.get_default_device()
    return inv_freq.float().to(device), float(scaling)
