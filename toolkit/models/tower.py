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
from toolkit.kernels.table import kernels_for
from toolkit.layers import Embedding, Join, Linear, MergedLinear, Norm
from toolkit.models import describe
from toolkit.models.mix import MLPMix
from toolkit.models.model import WeightModule
from toolkit.models.towers.parts import (
    Block,
    Lead,
    Merger,
    Patches,
    PictureArrays,
    Pool,
    Projection,
    Rotation,
    Tower,
)
from toolkit.weights.activation import activation_kind
from toolkit.weights.slots import Slot, Slots
from toolkit.weights.source import Source
from toolkit.weights.weight import parameter

ALIGNMENT = 64  # features between the products of an MLP, on a GPU


@dataclass(frozen=True, slots=True)
class PictureBatch:
    """Pictures that are encoded together. Tensors are on the device."""

    places: torch.Tensor  # [num_patches, 2] int32, row and column in the picture; -1: a lead's
    order: torch.Tensor  # [num_squares] int32, of the packed squares; windows are together
    back: torch.Tensor  # [num_rows] int32, square of each row for the decoder
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
    """Attention within segments of rows, such as pictures, windows or clips, and an MLP."""

    def __init__(self, block: Block, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.is_windowed = block.is_windowed
        self.attn_norm = Join(hidden, [_norm(block.attn_norm)])
        self.qkv = MergedLinear(hidden, [full_shard(hidden)] * 3, block.qkv, bias=block.qkv_bias)
        self.qk_norms = nn.ModuleList(_qk_norms(block.qk_norm, hidden))
        self.attn_out = Linear(hidden, hidden, block.out, bias=block.out_bias)
        self.mlp_norm = Join(hidden, [_norm(block.mlp_norm)])
        self.up, self.down = _products(block.mlp, hidden)
        scaled = zip(block.scales or (), (self.attn_out, self.down), strict=False)
        self.scales = nn.ModuleList(LayerScale(name, product) for name, product in scaled)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotation: torch.Tensor | None,
        segments: Segments,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (rows,), residual = self.attn_norm(x, residual)
        parts: torch.Tensor = self.qkv(rows).view(len(x), 3, -1)
        for index, norm in enumerate(self.qk_norms):
            norm(parts[:, index])
        qkv = parts.view(len(x), 3, self.num_heads, -1)
        attended = attend_rotated(qkv, rotation, segments).flatten(1)
        (rows,), residual = self.mlp_norm(self.attn_out(attended), residual)
        return self.down(self.up(rows)), residual


class RowNorm(Norm):
    """An RMS norm of rows [num_tokens, size], in place. Rows may be parts of longer ones."""

    def forward(self, rows: torch.Tensor) -> None:
        kernels_for(rows.device).rms_norm_rows(rows, self.weight, self.eps)


class LayerScale(nn.Module):
    """Factors of a product's features. The product's weight and bias have them after loading."""

    def __init__(self, name: str, product: Linear) -> None:
        super().__init__()
        self.name = name
        self.factors: nn.Parameter | None = parameter(torch.ones(product.weight.shape[0]))
        self._scaled = [*product.parameters()]

    def arrange(self) -> None:
        """Multiply the product's parameters."""
        assert self.factors is not None, "called once"
        factors = self.factors.float()
        for one in self._scaled:
            one.copy_(one.float() * factors.view(-1, *[1] * (one.dim() - 1)))
        self.factors, self._scaled = None, []

    def slots(self) -> Slots:
        assert self.factors is not None, "called before loading"
        return {self.name: Slot(self.factors)}


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


class SquareProduct(Linear):
    """A product of squares [num_squares, merge² · hidden], to [num_squares, hidden].

    The checkpoint's columns have a feature's patches together, and ours a patch's features."""

    def __init__(self, hidden: int, num_patches: int, source: Source) -> None:
        super().__init__(hidden * num_patches, hidden, source, bias=False)
        self._columns = tuple(
            feature * num_patches + patch
            for patch in range(num_patches)
            for feature in range(hidden)
        )

    def slots(self) -> Slots:
        (slot,) = super().slots().values()
        assert isinstance(slot, Slot)
        (source,) = self.sources
        return {source.tensor("weight"): dataclasses.replace(slot, entries=self._columns)}


class SquareMerger(nn.Module):
    """Makes one row of a square of patches."""

    def __init__(self, merger: Merger, tower: Tower) -> None:
        super().__init__()
        width = tower.hidden * tower.num_taps
        self.wide = wide = width * tower.merge**2
        self.norms_squares = merger.norms_squares
        self.norm = None if merger.norm is None else Join(merger.norm.size, [_norm(merger.norm)])
        self.shrink = None
        if merger.shrink is not None:
            self.shrink = SquareProduct(width, tower.merge**2, merger.shrink)
            wide = width
        kind, size = activation_kind(merger.activation), merger.size or wide
        self.up = Linear(wide, size, merger.up, bias=merger.bias, activation=kind)
        self.down = Linear(size, tower.out, merger.down, bias=merger.bias)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return [num_squares, out] of x + residual [num_patches, hidden]."""
        if self.norms_squares:
            assert residual is None, "the norm reads complete rows"
            x = x.view(-1, self.wide)
        if self.norm is not None:
            (x,), _ = self.norm(x, residual)
        elif residual is not None:
            x = x + residual
        x = x.view(-1, self.wide)
        if self.shrink is not None:
            x = self.shrink(x)
        merged: torch.Tensor = self.down(self.up(x))
        return merged


class SquarePool(nn.Module):
    """Makes one row of the mean of a square of patches."""

    def __init__(self, pool: Pool, tower: Tower) -> None:
        super().__init__()
        self.square = tower.merge**2
        self.norm, self.mean_norm = (
            Join(tower.hidden, [_norm(one)]) for one in (pool.norm, pool.mean_norm)
        )
        self.product = Linear(tower.hidden, tower.out, pool.product, bias=False)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return [num_squares, out] of x + residual [num_patches, hidden]."""
        (rows,), _ = self.norm(x, residual)
        means = rows.view(-1, self.square, rows.shape[1]).float().mean(1).to(rows.dtype)
        (rows,), _ = self.mean_norm(means, None)
        pooled: torch.Tensor = self.product(rows)
        return pooled


class SquareProjection(nn.Module):
    """Makes one row of a square of patches, by one product."""

    def __init__(self, projection: Projection, tower: Tower) -> None:
        super().__init__()
        self.norm = Join(tower.hidden, [_norm(projection.norm)])
        wide = tower.hidden * tower.merge**2
        self.product = Linear(wide, tower.out, projection.product, bias=False)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return [num_squares, out] of x + residual [num_patches, hidden]."""
        (rows,), _ = self.norm(x, residual)
        projected: torch.Tensor = self.product(rows.view(-1, self.product.columns.count))
        return projected


class LeadEmbedding(nn.Module):
    """An embedding next to patches."""

    def __init__(self, lead: Lead, hidden: int) -> None:
        super().__init__()
        self.name, self.weight = lead.name, parameter(torch.zeros(hidden))
        self._shape = (*[1] * lead.more_dimensions, hidden)  # in the checkpoint

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return the rows of patches [num_patches, hidden] with that of leads in their places."""
        return torch.where(places[:, :1] < 0, self.weight, x)

    def slots(self) -> Slots:
        return {self.name: Slot(self.weight.view(self._shape))}


class BareEmbedding(Embedding):
    """A table that is [1, size, hidden] in the checkpoint, where `name` is all of its name."""

    def slots(self) -> Slots:
        (slot,) = super().slots().values()
        assert isinstance(slot, Slot)
        return {self.name: Slot(slot.target[None])}


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
        self.lead = None if tower.lead is None else LeadEmbedding(tower.lead, tower.hidden)
        table = tower.table
        self.table: Embedding | None = None
        if table is not None:
            kind = BareEmbedding if table.is_bare else Embedding
            self.table = kind(table.name, table.size, tower.hidden)
        self.norm = None if tower.norm is None else Join(tower.hidden, [_norm(tower.norm)])
        self.blocks = nn.ModuleList(
            TowerBlock(block, tower.hidden, tower.num_heads) for block in tower.blocks
        )
        self.merger = _square_merger(tower.merger, tower)
        self.levels = nn.ModuleList(SquareMerger(merger, tower) for _, merger in tower.levels)
        self._after = {block: nth for nth, (block, _) in enumerate(tower.levels)}

    @torch.inference_mode()
    def normalize_by(self, factor: float, mean: Sequence[float], std: Sequence[float]) -> None:
        """Set the normalization of pixels."""
        self.factor = factor
        for buffer, values in ((self.mean, mean), (self.std, std)):
            buffer.copy_(torch.tensor(values)[:, None])

    def forward(self, pixels: torch.Tensor, batch: PictureBatch) -> torch.Tensor:
        """Return [num_rows, row size] of pixels [num_patches, channels · size²] uint8.

        Those of a lead are not read."""
        x: torch.Tensor = self.patches(self._normalized(pixels, batch.order))
        if self.lead is not None:
            x = self.lead(x, batch.places)
        if self.table is not None:
            assert batch.entries is not None
            assert batch.weights is not None
            entries = self.table(batch.entries)
            x = x + (entries * batch.weights[:, :, None].to(x.dtype)).sum(1)
        if self.norm is not None:
            (x,), _ = self.norm(x, None)
        rotation = None
        if self.tower.rotation is not None:
            rotation = self._angles(self.tower.rotation, batch.places)
        residual: torch.Tensor | None = None
        levels, taps = [], {}
        if 0 in self.tower.taps:
            taps[0] = x.clone()  # the blocks write the sum into it
        for index, block in enumerate(self.blocks):
            segments = batch.windows if block.is_windowed else batch.pictures
            x, residual = block(x, residual, rotation, segments)
            if index + 1 in self.tower.taps:
                taps[index + 1] = x + residual
            if (nth := self._after.get(index)) is not None:
                x, residual = x + residual, None
                levels.append(self.levels[nth](x))
        if taps:
            x, residual = torch.cat([taps[one] for one in self.tower.taps], dim=1), None
        rows = torch.cat([self.merger(x, residual), *levels], dim=1)
        return rows.index_select(0, batch.back)

    def _angles(self, rotation: Rotation, places: torch.Tensor) -> torch.Tensor:
        """Return cosines and sines [n, 2, head_size / 2]: angles by row, then by column."""
        size, device = self.tower.head_size // 2, places.device
        exponents = torch.arange(0, size, 2, dtype=torch.float32, device=device).expand(2, -1)
        if rotation.takes_turns:
            exponents = exponents + torch.arange(2, dtype=torch.float32, device=device)[:, None]
        speeds = 1.0 / (rotation.theta ** (exponents / size))
        angles = (places[:, :, None].float() * speeds).flatten(1)
        return torch.stack((angles.cos(), angles.sin()), dim=1)

    def _normalized(self, pixels: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """Return the pixels in the order of the blocks, in the tower's type."""
        channels = self.tower.patches.channels
        squares = pixels.view(len(order), -1).index_select(0, order)
        x = squares.view(len(pixels), channels, -1).float() * self.factor
        return ((x - self.mean) / self.std).flatten(1).to(self.dtype)


def _square_merger(merger: Merger | Pool | Projection, tower: Tower) -> nn.Module:
    """Return the module that makes one row of a square of patches."""
    if isinstance(merger, Pool):
        return SquarePool(merger, tower)
    if isinstance(merger, Projection):
        return SquareProjection(merger, tower)
    return SquareMerger(merger, tower)


def _qk_norms(norm: describe.HeadNorm | None, hidden: int) -> list[RowNorm]:
    """Return the norms of queries and keys; none without a description."""
    if norm is None:
        return []
    assert norm.span == "all", "as all towers"
    return [RowNorm(name, hidden, norm.eps) for name in (norm.q, norm.k)]


def _norm(norm: describe.Norm) -> Norm:
    return Norm(**dataclasses.asdict(norm))
