"""A tower, built from its description. It encodes pictures (Dosovitskiy et al., 2020)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from toolkit.attention.packed import Segments, attend_rotated, on_device
from toolkit.distributed import full_shard
from toolkit.layers import Embedding, Join, Linear, MergedLinear, Norm
from toolkit.models import describe
from toolkit.models.mix import MLPMix
from toolkit.models.model import WeightModule
from toolkit.models.towers.parts import Block, Merger, Patches, PictureArrays, Tower
from toolkit.weights.activation import activation_kind
from toolkit.weights.slots import Slot, Slots
from toolkit.weights.source import Source
from toolkit.weights.weight import parameter

ALIGNMENT = 64  # features between the products of an MLP, on a GPU


@dataclass(frozen=True, slots=True)
class PictureBatch:
    """Pictures that are encoded together. Tensors are on the device."""

    places: torch.Tensor  # [num_patches, 2] int32, row and column in the picture
    order: torch.Tensor  # [num_squares] int32, of the packed squares; windows are together
    back: torch.Tensor  # [num_squares] int32, the other way round
    entries: torch.Tensor | None  # [num_patches, 4] int32, of learned positions
    weights: torch.Tensor | None  # [num_patches, 4] fp32
    pictures: Segments
    windows: Segments

    @classmethod
    def of(cls, arrays: PictureArrays, device: torch.device, dtype: torch.dtype) -> PictureBatch:
        """Return the batch of these arrays, for a tower of a type."""
        given = arrays.places, arrays.order, arrays.back
        places, order, back = (on_device(device, one) for one in given)
        entries = weights = None
        if arrays.entries is not None and arrays.weights is not None:
            entries, weights = (on_device(device, one) for one in (arrays.entries, arrays.weights))
        pictures, windows = (
            Segments.of(lengths, device, dtype) for lengths in (arrays.pictures, arrays.windows)
        )
        return cls(places, order, back, entries, weights, pictures, windows)


class PatchProduct(nn.Module):
    """The first product, of pixels. [num_patches, channels · size²] to [num_patches, hidden]."""

    def __init__(self, patches: Patches, hidden: int) -> None:
        super().__init__()
        self.source = patches.source
        self.frames: nn.Parameter | None = parameter(torch.empty(hidden, *patches.shape))
        """The checkpoint's weight, until it is loaded."""
        self.weight = parameter(torch.empty(hidden, patches.pixels))
        self.bias = parameter(torch.empty(hidden)) if patches.bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def arrange(self) -> None:
        """Add the weights of frames, which are equal in a still picture."""
        assert self.frames is not None, "called once"
        frames = self.frames.float()
        self.weight.copy_((frames.sum(2) if frames.dim() == 5 else frames).flatten(1))
        self.frames = None

    def slots(self) -> Slots:
        assert self.frames is not None, "called before loading"
        slots: Slots = {self.source.tensor("weight"): Slot(self.frames)}
        if self.bias is not None:
            slots[self.source.tensor("bias")] = Slot(self.bias)
        return slots


class TowerBlock(nn.Module):
    """Attention within pictures or windows, and an MLP."""

    def __init__(self, block: Block, tower: Tower) -> None:
        super().__init__()
        hidden, self.num_heads = tower.hidden, tower.num_heads
        self.is_windowed = block.is_windowed
        self.attn_norm = Join(hidden, [_norm(block.attn_norm)])
        self.qkv = MergedLinear(hidden, [full_shard(hidden)] * 3, block.qkv, bias=True)
        self.attn_out = Linear(hidden, hidden, block.out, bias=True)
        self.mlp_norm = Join(hidden, [_norm(block.mlp_norm)])
        self.up, self.down = _products(block.mlp, hidden)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotation: torch.Tensor | None,
        batch: PictureBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (rows,), residual = self.attn_norm(x, residual)
        qkv: torch.Tensor = self.qkv(rows).view(len(x), 3, self.num_heads, -1)
        segments = batch.windows if self.is_windowed else batch.pictures
        attended = attend_rotated(qkv, rotation, segments).flatten(1)
        (rows,), residual = self.mlp_norm(self.attn_out(attended), residual)
        return self.down(self.up(rows)), residual


class PaddedLinear(Linear):
    """A product with more rows and columns than the checkpoint has; these are zero.

    On an H200 products of rows that begin at 16 bytes take a third of the time of others."""

    def __init__(
        self,
        shape: tuple[int, int],
        padded: tuple[int, int],
        sources: Sequence[Source],
        bias: bool,
        *activation: Any,
    ) -> None:
        """shape: rows and columns of each projection. activation: and whether it is gated."""
        parts = [full_shard(padded[0])] * len(sources)
        self._make(full_shard(padded[1]), parts, sources, bias, *activation)
        self._rows, self._columns = shape
        for one in self.parameters():
            one.zero_()

    def slots(self) -> Slots:
        slots: Slots = {}
        for source, part, index in zip(self.sources, self.parts, range(2), strict=False):
            rows = slice(index * part.count, index * part.count + self._rows)
            (weight,) = self.weight.part_slots(rows, (part, self.columns)).values()
            slots[source.tensor("weight")] = Slot(weight.target[:, : self._columns])
            if self.bias is not None:
                slots[source.tensor("bias")] = Slot(self.bias[rows])
        return slots


def _products(mlp: describe.MLP, hidden: int) -> tuple[Linear, Linear]:
    """Return up, with gate if there is one, and down."""
    size, wide = mlp.size, -(-mlp.size // ALIGNMENT) * ALIGNMENT
    if torch.get_default_device().type != "cuda" or size == wide:
        mix = MLPMix(mlp, hidden)
        return mix.input, mix.output
    sources = [mlp.up] if mlp.gate is None else [mlp.gate, mlp.up]
    kind = activation_kind(mlp.activation)
    up = PaddedLinear((size, hidden), (wide, hidden), sources, mlp.bias, kind, mlp.gate is not None)
    return up, PaddedLinear((hidden, size), (hidden, wide), [mlp.down], mlp.bias)


class SquareMerger(nn.Module):
    """Makes one row of a square of patches."""

    def __init__(self, merger: Merger, tower: Tower) -> None:
        super().__init__()
        wide = tower.hidden * tower.merge**2
        self.norms_squares, self.wide = merger.norms_squares, wide
        self.norm = Join(wide if merger.norms_squares else tower.hidden, [_norm(merger.norm)])
        kind = activation_kind(merger.activation)
        self.up = Linear(wide, wide, merger.up, bias=True, activation=kind)
        self.down = Linear(wide, tower.out, merger.down, bias=True)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return [num_squares, out] of x + residual [num_patches, hidden]."""
        if self.norms_squares:
            assert residual is None, "the norm reads complete rows"
            x = x.view(-1, self.wide)
        (rows,), _ = self.norm(x, residual)
        merged: torch.Tensor = self.down(self.up(rows.view(-1, self.wide)))
        return merged


class TowerModel(WeightModule):
    """Encodes pictures. Its parameters are uninitialized."""

    def __init__(self, tower: Tower, unused: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.tower, self.unused = tower, unused
        self.dtype = torch.get_default_dtype()
        self.mean, self.std = (
            nn.Buffer(torch.full((tower.patches.channels, 1), value, dtype=torch.float32))
            for value in (0.0, 1.0)
        )
        self.factor = 1.0
        """Pixels become (x · factor - mean) / std, by channel."""
        self.patches = PatchProduct(tower.patches, tower.hidden)
        table = tower.table
        self.table = None if table is None else Embedding(table.name, table.size, tower.hidden)
        self.blocks = nn.ModuleList(TowerBlock(block, tower) for block in tower.blocks)
        self.merger = SquareMerger(tower.merger, tower)
        self.levels = nn.ModuleList(SquareMerger(merger, tower) for _, merger in tower.levels)
        self._after = {block: nth for nth, (block, _) in enumerate(tower.levels)}

    @torch.inference_mode()
    def normalize_by(self, factor: float, mean: Sequence[float], std: Sequence[float]) -> None:
        """Set the normalization of pixels."""
        self.factor = factor
        for buffer, values in ((self.mean, mean), (self.std, std)):
            buffer.copy_(torch.tensor(values)[:, None])

    def forward(self, pixels: torch.Tensor, batch: PictureBatch) -> torch.Tensor:
        """Return [num_squares, row size] of pixels [num_patches, channels · size²] uint8."""
        x: torch.Tensor = self.patches(self._normalized(pixels, batch.order))
        if self.table is not None:
            assert batch.entries is not None
            assert batch.weights is not None
            entries = self.table(batch.entries)
            x = x + (entries * batch.weights[:, :, None].to(x.dtype)).sum(1)
        rotation = None if self.tower.rope_theta is None else self._rotation(batch.places)
        residual: torch.Tensor | None = None
        levels = []
        for index, block in enumerate(self.blocks):
            x, residual = block(x, residual, rotation, batch)
            if (nth := self._after.get(index)) is not None:
                x, residual = x + residual, None
                levels.append(self.levels[nth](x))
        rows = torch.cat([self.merger(x, residual), *levels], dim=1)
        return rows.index_select(0, batch.back)

    def _rotation(self, places: torch.Tensor) -> torch.Tensor:
        """Return cosines and sines [n, 2, head_size / 2]: angles by row, then by column."""
        size = self.tower.head_size // 2
        assert self.tower.rope_theta is not None
        exponents = torch.arange(0, size, 2, dtype=torch.float32, device=places.device) / size
        speeds = 1.0 / (self.tower.rope_theta**exponents)
        angles = (places[:, :, None].float() * speeds).flatten(1)
        return torch.stack((angles.cos(), angles.sin()), dim=1)

    def _normalized(self, pixels: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """Return the pixels in the order of the blocks, in the tower's type."""
        channels = self.tower.patches.channels
        squares = pixels.view(len(order), -1).index_select(0, order)
        x = squares.view(len(pixels), channels, -1).float() * self.factor
        return ((x - self.mean) / self.std).flatten(1).to(self.dtype)


def _norm(norm: describe.Norm) -> Norm:
    return Norm(**dataclasses.asdict(norm))
