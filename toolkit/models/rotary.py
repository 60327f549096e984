"""Rotary position embedding (Su et al., 2021), with every scaling of Transformers' Llama."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from toolkit.errors import CheckpointError
from toolkit.models.describe import Rope


class RotaryTables(nn.Module):
    """Tables of rotations, one for each kind of layer: [max_model_len, 2, size / 2].

    A step gathers the rows of its tokens once, for all layers (`take`). Attention rotates pairs
    (i, i + size / 2) of the first `size` dimensions of each head.

    NOTE: scalings that depend on the sequence length (dynamic, longrope) use `max_model_len`.
    Transformers uses the current length, so keys in its cache keep angles that no longer fit. The
    two agree as long as `max_model_len` is within the length that the model was first trained for.
    """

    def __init__(self, ropes: Iterable[Rope], max_model_len: int, axes: Sequence[int] = ()) -> None:
        """`axes`: that of each pair, for tokens with a position on each of several axes."""
        super().__init__()
        self._axes = nn.Buffer(torch.tensor(axes, dtype=torch.int64), persistent=False)
        self._kinds: list[tuple[Rope, bool]] = []  # (rotation, is it of queries alone)
        self._max_model_len = max_model_len
        self._tables: list[str] = []
        for rope in ropes:
            self._add(rope, False)
            if rope.query_scaling is not None:
                self._add(rope, True)

    def indices(self, rope: Rope | None) -> tuple[int | None, int | None]:
        """Return the tables of (queries and keys, queries alone) of a layer; None: none."""
        if rope is None:
            return None, None
        both = self._kinds.index((rope, False))
        if rope.query_scaling is None:
            return both, None
        return both, self._kinds.index((rope, True))

    def take(self, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return each table's rows, [num_tokens, 2, size / 2].

        positions: [num_tokens], or [num_axes, num_tokens]."""
        tables = [getattr(self, name) for name in self._tables]
        if positions.dim() == 1:
            return tuple(table.index_select(0, positions) for table in tables)
        index = positions.long().index_select(0, self._axes).T[:, None]
        return tuple(table.gather(0, index.expand(-1, 2, -1)) for table in tables)

    def _add(self, rope: Rope, of_queries: bool) -> None:
        if (rope, of_queries) not in self._kinds:
            self._tables.append(f"table{len(self._kinds)}")
            self._kinds.append((rope, of_queries))
            table = _table(rope, self._max_model_len, of_queries)
            self.register_buffer(self._tables[-1], table, persistent=False)


def _table(rope: Rope, max_model_len: int, of_queries: bool) -> torch.Tensor:
    inv_freq, factor = inverse_frequencies(rope, max_model_len)
    dtype = torch.get_default_dtype()
    if inv_freq.is_meta:
        # On meta, the arithmetic below makes PyTorch load its compiler, which takes seconds.
        return torch.empty(max_model_len, 2, len(inv_freq), dtype=dtype, device="meta")
    positions = torch.arange(max_model_len, dtype=torch.float32, device=inv_freq.device)
    angles = torch.outer(positions, inv_freq)
    table = torch.stack((angles.cos(), angles.sin()), dim=1) * factor
    if of_queries and rope.query_scaling is not None:
        scaling = rope.query_scaling
        steps = (positions + scaling.offset) // scaling.length
        table = table * (1 + scaling.beta * torch.log1p(steps))[:, None, None]
    return table.to(dtype)


def inverse_frequencies(rope: Rope, max_model_len: int) -> tuple[torch.Tensor, float]:
    """Return (inverse frequencies [size / 2] in fp32, factor on cosines and sines).

    Raises CheckpointError if the rotation's parameters cannot be used."""
    kind, head_size = rope.parameters.get("rope_type", "default"), rope.head_size
    device = torch.get_default_device()
    try:
        with torch.device("cpu"):
            inv_freq, factor = SCALINGS[kind](_Scaled(rope, max_model_len))
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
class _Scaled:
    """Inputs of a scaling."""

    rope: Rope
    max_model_len: int

    @property
    def parameters(self) -> dict[str, Any]:
        return self.rope.parameters

    @property
    def head_size(self) -> int:
        return self.rope.head_size

    @property
    def base(self) -> float:
        return float(self.parameters["rope_theta"])

    @property
    def size(self) -> int:
        """Number of rotated dimensions of a head."""
        return int(self.head_size * self.parameters.get("partial_rotary_factor", 1.0))

    @property
    def trained_len(self) -> int:
        return self.rope.trained_len

    @property
    def extension(self) -> float:
        """Extended over trained context length: `factor`, or else the ratio of the lengths."""
        factor = self.parameters.get("factor")
        return float(self.rope.max_positions / self.trained_len if factor is None else factor)

    def wavelengths(self, base: float | None = None) -> torch.Tensor:
        """Return positions per radian, base^(2i / size), [size / 2]."""
        exponents = torch.arange(0, self.size, 2, dtype=torch.float32) / self.size
        lengths: torch.Tensor = (base or self.base) ** exponents
        return lengths


def _default(rope: _Scaled) -> tuple[torch.Tensor, float]:
    return 1.0 / rope.wavelengths(), 1.0


def _linear(rope: _Scaled) -> tuple[torch.Tensor, float]:
    """Position interpolation (Chen et al., 2023): divide positions by the factor."""
    return 1.0 / rope.wavelengths() / rope.parameters["factor"], 1.0


def _proportional(rope: _Scaled) -> tuple[torch.Tensor, float]:
    """Rotate only the first pairs, by angles relative to the full head size."""
    fraction = rope.parameters.get("partial_rotary_factor", 1.0)
    num_rotated = int(fraction * rope.head_size // 2)
    inv_freq = torch.zeros(rope.head_size // 2)
    exponents = torch.arange(0, 2 * num_rotated, 2, dtype=torch.float32) / rope.head_size
    inv_freq[:num_rotated] = 1.0 / rope.base**exponents
    return inv_freq / rope.parameters.get("factor", 1.0), 1.0


def _dynamic(rope: _Scaled) -> tuple[torch.Tensor, float]:
    """Dynamic NTK scaling (section 3.3 of Peng et al., 2023).

    Past the trained length, the base grows with the length."""
    factor, trained_len = rope.parameters["factor"], rope.trained_len
    length = max(rope.max_model_len, trained_len)
    growth = factor * length / trained_len - (factor - 1)
    return 1.0 / rope.wavelengths(rope.base * growth ** (rope.size / (rope.size - 2))), 1.0


def _yarn(rope: _Scaled) -> tuple[torch.Tensor, float]:
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


def _longrope(rope: _Scaled) -> tuple[torch.Tensor, float]:
    """LongRoPE (Ding et al., 2024): a factor per pair, one set for lengths beyond the trained."""
    is_long = rope.max_model_len > rope.trained_len
    factors = torch.tensor(
        rope.parameters["long_factor" if is_long else "short_factor"], dtype=torch.float32
    )
    # Phi-3.5-MoE has one for each set.
    own = rope.parameters.get("long_mscale" if is_long else "short_mscale")
    given = rope.parameters.get("attention_factor") if own is None else own
    if given is not None:
        attention_factor = float(given)
    elif rope.extension <= 1.0:
        attention_factor = 1.0
    else:
        attention_factor = math.sqrt(1 + math.log(rope.extension) / math.log(rope.trained_len))
    return 1.0 / (factors * rope.wavelengths()), attention_factor


def _llama3(rope: _Scaled) -> tuple[torch.Tensor, float]:
    """Llama 3.1's scaling (Grattafiori et al., 2024).

    Low frequencies are divided by the factor, high ones are kept, and those between are
    interpolated by their turns within the trained length."""
    parameters = rope.parameters
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    inv_freq = 1.0 / rope.wavelengths()
    turns = rope.trained_len * inv_freq / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * inv_freq / parameters["factor"] + kept * inv_freq, 1.0


SCALINGS: dict[str, Callable[[_Scaled], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}  # scalings by `rope_type`. They return (inverse frequencies in fp32, factor on cos and sin)
