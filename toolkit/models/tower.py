"""A tower, built from its description. It encodes pictures (Dosovitskiy et al., 2020)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from toolkit.attention.packed import Segments, attend_rotated, on_device
from toolkit.distributed import full_shard
from toolkit.layers import Embedding, Join, Linear, MergedLinear, Norm
from toolkit.models import describe
from toolkit.models.mix import MLPMix
from toolkit.models.model import WeightModule
from toolkit.models.towers.parts import Block, Grid, Merger, Patches, Tower, layout_of, resampled
from toolkit.weights.activation import activation_kind
from toolkit.weights.slots import Slot, Slots
from toolkit.weights.source import Source
from toolkit.weights.weight import parameter

ALIGNMENT = 64  # features between the products of an MLP, on a GPU


@dataclass(frozen=True, slots=True)
class Normalization:
    """Pixels become (x · factor - mean) / std, by channel."""

    factor: float = 1.0
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)


@dataclass(frozen=True, slots=True)
class PictureBatch:
    """Pictures that are encoded together. Tensors are on the device."""

    order: torch.Tensor | None  # [num_squares] int64, of the packed squares; None: as they are
    back: torch.Tensor | None  # [num_squares] int64, the other way round
    rotation: torch.Tensor | None  # [num_patches, 2, head_size / 2] fp32, cosines and sines
    table: tuple[torch.Tensor, torch.Tensor] | None  # entries of learned positions, and weights
    pictures: Segments
    windows: Segments


class PatchProduct(nn.Module):
    """The first product, of pixels. [num_patches, channels · size²] to [num_patches, hidden]."""

    def __init__(self, patches: Patches, hidden: int) -> None:
        super().__init__()
        self.patches = patches
        self.weight = parameter(torch.empty(hidden, *patches.shape))
        self.bias = parameter(torch.empty(hidden)) if patches.bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def arrange(self) -> None:
        """Add the weights of frames, which are equal in a still picture."""
        weight: torch.Tensor = self.weight
        if self.patches.frames > 1:
            weight = weight.float().sum(2).to(weight.dtype)
        self.weight = parameter(weight.flatten(1))

    def slots(self) -> Slots:
        source = self.patches.source
        slots: Slots = {source.tensor("weight"): Slot(self.weight)}
        if self.bias is not None:
            slots[source.tensor("bias")] = Slot(self.bias)
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
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: PictureBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (rows,), residual = self.attn_norm(x, residual)
        qkv: torch.Tensor = self.qkv(rows).view(len(x), 3, self.num_heads, -1)
        segments = batch.windows if self.is_windowed else batch.pictures
        attended = attend_rotated(qkv, batch.rotation, segments).flatten(1)
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
        self.normalization = Normalization()
        self.patches = PatchProduct(tower.patches, tower.hidden)
        table = tower.table
        self.table = None if table is None else Embedding(table.name, table.size, tower.hidden)
        self.blocks = nn.ModuleList(TowerBlock(block, tower) for block in tower.blocks)
        self.merger = SquareMerger(tower.merger, tower)
        self.levels = nn.ModuleList(SquareMerger(merger, tower) for _, merger in tower.levels)
        self._after = {block: nth for nth, (block, _) in enumerate(tower.levels)}

    def forward(self, pixels: torch.Tensor, batch: PictureBatch) -> torch.Tensor:
        """Return [num_squares, row size] of pixels [num_patches, channels · size²] uint8."""
        x = self.patches(self._normalized(pixels, batch))
        if self.table is not None and batch.table is not None:
            entries, weights = batch.table
            learned = (self.table(entries) * weights[:, :, None].to(x.dtype)).sum(1)
            x = x + learned
        residual: torch.Tensor | None = None
        levels = []
        for index, block in enumerate(self.blocks):
            x, residual = block(x, residual, batch)
            if (nth := self._after.get(index)) is not None:
                x, residual = x + residual, None
                levels.append(self.levels[nth](x))
        rows = torch.cat([self.merger(x, residual), *levels], dim=1)
        return rows if batch.back is None else rows[batch.back]

    def batch_of(self, grids: Sequence[Grid], device: torch.device) -> PictureBatch:
        """Return the inputs of pictures besides their pixels, on the device."""
        tower = self.tower
        layouts = [layout_of(grid, tower.merge, tower.window) for grid in grids]
        places = np.concatenate([one.places for one in layouts])
        order = back = rotation = table = None
        if tower.window:
            squares = [rows * columns for rows, columns in grids]
            firsts = np.cumsum([0, *squares[:-1]])
            all_orders = zip(layouts, firsts, strict=True)
            found = np.concatenate([one.order + first for one, first in all_orders])
            order, back = on_device(device, found), on_device(device, np.argsort(found))
        if tower.rope_theta is not None:
            rotation = self._rotation(on_device(device, places))
        if tower.table is not None:
            side = int(tower.table.size**0.5)
            both = zip(layouts, grids, strict=True)
            found_entries = [resampled(one.places, tower.patch_grid(g), side) for one, g in both]
            entries, weights = (np.concatenate(part) for part in zip(*found_entries, strict=True))
            table = on_device(device, entries), on_device(device, weights)
        lengths = np.array([tower.num_patches(grid) for grid in grids])
        windows = np.concatenate([one.windows for one in layouts])
        return PictureBatch(
            order,
            back,
            rotation,
            table,
            Segments.of(lengths, device, self.dtype),
            Segments.of(windows, device, self.dtype),
        )

    def _rotation(self, places: torch.Tensor) -> torch.Tensor:
        """Return cosines and sines [n, 2, head_size / 2]: angles by row, then by column."""
        size = self.tower.head_size // 2
        assert self.tower.rope_theta is not None
        exponents = torch.arange(0, size, 2, dtype=torch.float32, device=places.device) / size
        speeds = 1.0 / (self.tower.rope_theta**exponents)
        angles = (places[:, :, None].float() * speeds).flatten(1)
        return torch.stack((angles.cos(), angles.sin()), dim=1)

    def _normalized(self, pixels: torch.Tensor, batch: PictureBatch) -> torch.Tensor:
        """Return the pixels in the order of the blocks, in the tower's type."""
        if batch.order is not None:
            square = self.tower.merge**2
            pixels = pixels.view(-1, square * pixels.shape[1])[batch.order].view_as(pixels)
        given, channels = self.normalization, self.tower.patches.channels
        mean, std = (torch.tensor(one, device=pixels.device) for one in (given.mean, given.std))
        x = pixels.view(len(pixels), channels, -1).float() * given.factor
        return ((x - mean[:, None]) / std[:, None]).flatten(1).to(self.dtype)


def _norm(norm: describe.Norm) -> Norm:
    return Norm(**dataclasses.asdict(norm))
