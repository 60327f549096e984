"""Descriptions of towers: encoders of pictures next to a decoder. Imports no torch.

A picture is a grid of patches. Squares of `merge` x `merge` patches become one row, which stands
for one token of the decoder. A tower orders patches by these squares, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from toolkit.models.describe import MLP, Norm, Table
from toolkit.weights.source import Source, consecutive

Grid = tuple[int, int]  # rows and columns of the tokens of a picture
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Patches:
    """The product of a patch's pixels: a convolution whose steps are as wide as its kernel."""

    source: Source
    size: int  # pixels of a patch's side
    channels: int = 3
    frames: int = 1  # of the kernel. A still picture's frames are equal
    bias: bool = False

    @property
    def pixels(self) -> int:
        """Numbers of a patch of a still picture."""
        return self.channels * self.size**2

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a patch in the checkpoint."""
        frames = (self.frames,) if self.frames > 1 else ()
        return (self.channels, *frames, self.size, self.size)


@dataclass(frozen=True, slots=True)
class Block:
    """Attention among a picture's patches, and an MLP, each after a norm."""

    attn_norm: Norm
    qkv: tuple[Source, ...]
    out: Source
    mlp_norm: Norm
    mlp: MLP
    is_windowed: bool = False


@dataclass(frozen=True, slots=True)
class Merger:
    """down(activation(up(squares of patches, each row after a norm)))."""

    norm: Norm
    up: Source
    down: Source
    activation: str = "gelu"
    norms_squares: bool = False  # the norm spans the rows of a square


@dataclass(frozen=True, slots=True)
class Tower:
    """An encoder of pictures."""

    hidden: int
    num_heads: int
    out: int  # size of a row for the decoder
    patches: Patches
    blocks: Sequence[Block]
    merger: Merger
    merge: int = 2  # patches of a square's side
    table: Table | None = None  # learned positions of a square grid, resampled to a picture's
    rope_theta: float | None = None  # of the rotation by row and column; None: none
    window: int = 0  # squares of a window's side, in windowed blocks
    levels: tuple[tuple[int, Merger], ...] = ()
    """DeepStack (Meng et al., 2024): (block, its merger). The rows are added after the decoder's
    first layers, in order."""

    @property
    def head_size(self) -> int:
        return self.hidden // self.num_heads

    @property
    def row_size(self) -> int:
        """Numbers for each token: its embedding, and a row for each level."""
        return self.out * (1 + len(self.levels))

    def patch_grid(self, grid: Grid) -> Grid:
        return grid[0] * self.merge, grid[1] * self.merge

    def num_patches(self, grid: Grid) -> int:
        rows, columns = self.patch_grid(grid)
        return rows * columns


@dataclass(frozen=True, slots=True)
class Layout:
    """Patches of a picture, in the order in which the blocks have them."""

    order: Ints | None  # squares by their index in the picture; None: as they are
    places: Ints  # [num_patches, 2], row and column of each patch
    windows: Ints  # numbers of patches of windows, one after the other


@lru_cache(maxsize=256)
def layout_of(grid: Grid, merge: int, window: int) -> Layout:
    """Return the layout of a picture's patches, with windows of so many squares if any.

    Windows begin at the top left; those at the other edges are cut (Qwen2.5-VL,
    arXiv:2502.13923, section 2.1.1)."""
    rows, columns = grid
    squares = np.arange(rows * columns).reshape(rows, columns)
    order, counts = None, [rows * columns]
    if window:
        parts = [
            squares[top : top + window, left : left + window].ravel()
            for top in range(0, rows, window)
            for left in range(0, columns, window)
        ]
        order, counts = np.concatenate(parts), [len(part) for part in parts]
    ordered = squares.ravel() if order is None else order
    inside = np.arange(merge * merge)
    row = (ordered // columns)[:, None] * merge + inside // merge
    column = (ordered % columns)[:, None] * merge + inside % merge
    places = np.stack((row.ravel(), column.ravel()), axis=1)
    return Layout(order, places, np.array(counts) * merge * merge)


def resampled(places: Ints, grid: Grid, side: int) -> tuple[Ints, npt.NDArray[np.float32]]:
    """Return (entries [n, 4], weights [n, 4]) of a table [side · side] for patches of a grid.

    Bilinear, with equal corners: the first and the last patch have the first and the last entry.
    """
    taps, shares = [], []
    for axis, size in enumerate(grid):
        at = (
            places[:, axis].astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
        )
        low = np.floor(at).astype(np.int64)
        part = at - low
        taps.append(np.stack((low, np.minimum(low + 1, side - 1)), axis=1))
        shares.append(np.stack((1 - part, part), axis=1))
    entries = taps[0][:, :, None] * side + taps[1][:, None, :]
    weights = shares[0][:, :, None] * shares[1][:, None, :]
    return entries.reshape(-1, 4), weights.reshape(-1, 4).astype(np.float32)


class TowerConfig(msgspec.Struct, kw_only=True):
    """Fields of every tower's config: `vision_config` of a config.json."""

    fixed: ClassVar[dict[str, tuple[object, ...]]] = {}  # as in `ArchitectureConfig`
    model_type: str = ""
    dtype: str | None = None


def fused(name: str, hidden: int) -> tuple[Source, ...]:
    """Return queries, keys and values that are one tensor, one after the other."""
    return tuple(Source(name, order) for order in consecutive(hidden, hidden, hidden))
