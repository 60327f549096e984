"""Rotary position embedding (Su et al., 2021), with every scaling of Transformers' Llama."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from toolkit.errors import CheckpointError


class RotaryEmbedding(nn.Module):
    """Table of rotations, `cos_sin` [max_model_len, 2, size / 2].

    Attention rotates pairs (i, i + size / 2) of the first `size` dimensions of each head.

    NOTE: scalings that depend on the sequence length (dynamic, longrope) use `max_model_len`.
    Transformers uses the current length, so keys in its cache keep angles that no longer fit. The
    two agree as long as `max_model_len` is within the length that the model was first trained for.
    """

    cos_sin: torch.Tensor

    def __init__(self, config: Any, head_size: int, max_model_len: int) -> None:
        super().__init__()
        inv_freq, scaling = inverse_frequencies(config, head_size, max_model_len)
        if inv_freq.is_meta:
            # On meta, the arithmetic below makes PyTorch load its compiler, which takes seconds.
            table = torch.empty(max_model_len, 2, len(inv_freq), device="meta")
        else:
            positions = torch.arange(max_model_len, dtype=torch.float32, device=inv_freq.device)
            angles = torch.outer(positions, inv_freq)
            table = torch.stack((angles.cos(), angles.sin()), dim=1) * scaling
        self.register_buffer("cos_sin", table.to(torch.get_default_dtype()), persistent=False)


def inverse_frequencies(
    config: Any, head_size: int, max_model_len: int
) -> tuple[torch.Tensor, float]:
    """Return (inverse frequencies [size / 2] in fp32, factor on cosines and sines).

    Raises CheckpointError if the config's `rope_parameters` cannot be used."""
    kind = config.rope_parameters.get("rope_type", "default")
    if kind not in SCALINGS:
        raise CheckpointError(f"Unsupported rope_type {kind!r}. Supported: {', '.join(SCALINGS)}.")
    device = torch.get_default_device()
    try:
        with torch.device("cpu"):
            inv_freq, factor = SCALINGS[kind](
                Rope(config, config.rope_parameters, head_size, max_model_len)
            )
    except KeyError as error:
        raise CheckpointError(
            f"The model's rope_parameters of type {kind!r} lack {error}."
        ) from None
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        text = " ".join(str(error).split())
        raise CheckpointError(
            f"The model's rope_parameters of type {kind!r} cannot be used: {text}."
        ) from None
    if 2 * len(inv_freq) > head_size:
        raise CheckpointError(
            f"Rotary embeddings need an even head size. The model's head size is {head_size}."
        )
    return inv_freq.to(device), factor


@dataclass(frozen=True, slots=True)
class Rope:
    """Inputs of a scaling.

    Of `config`, scalings read `max_position_embeddings` at most, if their parameters lack it."""

    config: Any
    parameters: dict[str, Any]
    head_size: int
    max_model_len: int

    @property
    def base(self) -> float:
        return float(self.parameters["rope_theta"])

    @property
    def size(self) -> int:
        """Number of rotated dimensions of a head."""
        return int(self.head_size * self.parameters.get("partial_rotary_factor", 1.0))

    @property
    def trained_len(self) -> int:
        """Context length before it was extended."""
        return int(self.parameters["original_max_position_embeddings"])

    @property
    def extension(self) -> float:
        """Extended over trained context length: `factor`, or else the ratio of the lengths."""
        factor = self.parameters.get("factor")
        return float(
            self.config.max_position_embeddings / self.trained_len if factor is None else factor
        )

    def wavelengths(self, base: float | None = None) -> torch.Tensor:
        """Return positions per radian, base^(2i / size), [size / 2]."""
        exponents = torch.arange(0, self.size, 2, dtype=torch.float32) / self.size
        lengths: torch.Tensor = (base or self.base) ** exponents
        return lengths


def _default(rope: Rope) -> tuple[torch.Tensor, float]:
    return 1.0 / rope.wavelengths(), 1.0


def _linear(rope: Rope) -> tuple[torch.Tensor, float]:
    """Position interpolation (Chen et al., 2023): divide positions by the factor."""
    return 1.0 / rope.wavelengths() / rope.parameters["factor"], 1.0


def _proportional(rope: Rope) -> tuple[torch.Tensor, float]:
    """Rotate only the first pairs, by angles relative to the full head size."""
    fraction = rope.parameters.get("partial_rotary_factor", 1.0)
    num_rotated = int(fraction * rope.head_size // 2)
    inv_freq = torch.zeros(rope.head_size // 2)
    exponents = torch.arange(0, 2 * num_rotated, 2, dtype=torch.float32) / rope.head_size
    inv_freq[:num_rotated] = 1.0 / rope.base**exponents
    return inv_freq / rope.parameters.get("factor", 1.0), 1.0


def _dynamic(rope: Rope) -> tuple[torch.Tensor, float]:
    """Dynamic NTK scaling (section 3.3 of Peng et al., 2023).

    Past the trained length, the base grows with the length."""
    factor, trained_len = rope.parameters["factor"], rope.config.max_position_embeddings
    length = max(rope.max_model_len, trained_len)
    growth = factor * length / trained_len - (factor - 1)
    return 1.0 / rope.wavelengths(rope.base * growth ** (rope.size / (rope.size - 2))), 1.0


def _yarn(rope: Rope) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al., 2023): interpolate low frequencies, keep high ones, with a ramp between.

    Section 3.4 gives the factor on cosines and sines."""
    parameters, extension = rope.parameters, rope.extension
    fast, slow = parameters.get("beta_fast") or 32, parameters.get("beta_slow") or 1

    def pair_index(turns: float) -> float:
        """Return the pair that turns so often within the trained length."""
        return (
            rope.size
            * math.log(rope.trained_len / (turns * 2 * math.pi))
            / (2 * math.log(rope.base))
        )

    first, last = pair_index(fast), pair_index(slow)
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.size - 1)
    width = last - first or 0.001
    interpolated = ((torch.arange(rope.size // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    wavelengths = rope.wavelengths()
    inv_freq = interpolated / (extension * wavelengths) + (1 - interpolated) / wavelengths
    return inv_freq, _yarn_attention_factor(parameters, extension)


def _yarn_attention_factor(parameters: dict[str, Any], extension: float) -> float:
    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(extension) + 1.0 if extension > 1 else 1.0

    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return (
        magnitude(mscale) / magnitude(mscale_all_dim)
        if mscale and mscale_all_dim
        else magnitude(1.0)
    )


def _longrope(rope: Rope) -> tuple[torch.Tensor, float]:
    """LongRoPE (Ding et al., 2024): a factor per pair, one set for lengths beyond the trained."""
    is_long = rope.max_model_len > rope.trained_len
    factors = torch.tensor(
        rope.parameters["long_factor" if is_long else "short_factor"], dtype=torch.float32
    )
    given = rope.parameters.get("attention_factor")
    if given is not None:
        attention_factor = float(given)
    elif rope.extension <= 1.0:
        attention_factor = 1.0
    else:
        attention_factor = math.sqrt(1 + math.log(rope.extension) / math.log(rope.trained_len))
    return 1.0 / (factors * rope.wavelengths()), attention_factor


def _llama3(rope: Rope) -> tuple[torch.Tensor, float]:
    """Llama 3.1's scaling (Grattafiori et al., 2024).

    Low frequencies are divided by the factor, high ones are kept, and those between are
    interpolated by their turns within the trained length."""
    parameters = rope.parameters
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    inv_freq = 1.0 / rope.wavelengths()
    turns = rope.trained_len * inv_freq / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * inv_freq / parameters["factor"] + kept * inv_freq, 1.0


SCALINGS: dict[str, Callable[[Rope], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}  # scalings by `rope_type`. They return (inverse frequencies in fp32, factor on cos and sin)
