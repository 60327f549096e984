"""Descriptions of towers: encoders of pictures next to a decoder. Imports no torch.

A picture is a grid of patches, or several: tiles of one size. Squares of `merge` x `merge` patches
become one row, which stands for one token of the decoder. A tower orders patches by these squares,
row by row, tile by tile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit.models.describe import MLP, HeadNorm, Norm, Table
from toolkit.weights.activation import activation_kind
from toolkit.weights.source import Source, consecutive

Grid = tuple[int, int]  # rows and columns of the tokens of a picture
Array = npt.NDArray[Any]


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
    qkv_bias: bool = True
    out_bias: bool = True
    qk_norm: HeadNorm | None = None  # spans all heads
    scales: tuple[str, str] | None = None
    """Names of factors of each feature (LayerScale, arXiv:2103.17239): of the output of attention,
    and of the MLP's."""


@dataclass(frozen=True, slots=True)
class Merger:
    """down(activation(up(squares of patches, each row after a norm)))."""

    norm: Norm | None
    up: Source
    down: Source
    activation: str = "gelu"
    norms_squares: bool = False  # the norm spans the rows of a square
    size: int = 0  # features between up and down; 0: those of a square
    bias: bool = True  # of up and down
    shrink: Source | None = None
    """A product before `up`, without a bias, from a square's features to a patch's. In the
    checkpoint its columns have the patches of a square one after the other for each feature."""

    def __post_init__(self) -> None:
        activation_kind(self.activation)  # refuses an unknown name


@dataclass(frozen=True, slots=True)
class Pool:
    """product(norm of the mean of a square of patches, each after a norm)."""

    norm: Norm
    mean_norm: Norm
    product: Source  # without a bias


@dataclass(frozen=True, slots=True)
class Projection:
    """product(squares of patches, each after a norm)."""

    norm: Norm
    product: Source  # without a bias


@dataclass(frozen=True, slots=True)
class Rotation:
    """A rotation of a head's pairs (i, i + half): the first half by row, the others by column."""

    theta: float
    takes_turns: bool = False
    """Rows have the even and columns the odd ones of a head's frequencies, as in Pixtral
    (arXiv:2410.07073); else both have every second one."""


@dataclass(frozen=True, slots=True)
class Lead:
    """An embedding next to a picture's patches: CLIP's class token (arXiv:2103.00020)."""

    name: str  # of the tensor
    is_kept: bool = False  # the decoder reads its row, before the others
    more_dimensions: int = 0  # of size 1, before the embedding's


@dataclass(frozen=True, slots=True)
class Tower:
    """An encoder of pictures."""

    hidden: int
    num_heads: int
    out: int  # size of a row for the decoder
    patches: Patches
    blocks: Sequence[Block]
    merger: Merger | Pool | Projection
    merge: int = 2  # patches of a square's side
    lead: Lead | None = None
    table: Table | None = None
    """Learned positions of a square grid, resampled to a picture's. Those before `first` are the
    lead's."""
    has_fixed_size: bool = False  # positions are not resampled
    is_tiled: bool = False
    """Larger pictures are tiles of the fixed size, row by row, and then one of the whole picture.
    The grid of such a picture has the rows and columns of all tiles but the last."""
    norm: Norm | None = None  # before the blocks
    rotation: Rotation | None = None
    taps: tuple[int, ...] = ()
    """Numbers of blocks after which the merger reads the patches, one tap after the other. Empty:
    after the last."""
    unused: tuple[str, ...] = ()  # substrings of checkpoint tensor names to ignore
    window: int = 0  # squares of a window's side, in windowed blocks
    levels: tuple[tuple[int, Merger], ...] = ()
    """DeepStack (Meng et al., 2024): (block, its merger). The rows are added after the decoder's
    first layers, in order."""

    @property
    def head_size(self) -> int:
        return self.hidden // self.num_heads

    @property
    def side(self) -> int:
        """Entries of a side of the table of positions; 0 without one."""
        return 0 if self.table is None else math.isqrt(self.table.size - self.table.first)

    @property
    def fixed_squares(self) -> int:
        """Squares of every picture, the lead included; 0 if pictures differ."""
        side = self.side // self.merge
        return side**2 + (self.lead is not None) if self.has_fixed_size else 0

    @property
    def num_first_rows(self) -> int:
        """Rows of a picture before those of its grid."""
        return int(self.lead is not None and self.lead.is_kept)

    @property
    def num_taps(self) -> int:
        return max(1, len(self.taps))

    @property
    def most_window(self) -> int:
        """Most patches of a window; without windows, of a picture."""
        return (self.window * self.merge) ** 2 or 2**31

    @property
    def row_size(self) -> int:
        """Numbers for each token: its embedding, and a row for each level."""
        return self.out * (1 + len(self.levels))

    def patch_grid(self, grid: Grid) -> Grid:
        return grid[0] * self.merge, grid[1] * self.merge

    def tiles(self, grid: Grid) -> list[Grid]:
        """Return the grids that are encoded each on its own."""
        if not self.is_tiled:
            return [grid]
        side = self.side // self.merge
        count = (grid[0] // side) * (grid[1] // side)
        return [(side, side)] * (count + (count > 1))

    def num_rows(self, grid: Grid) -> int:
        """Return the number of a picture's rows for the decoder."""
        return sum(self.num_first_rows + rows * columns for rows, columns in self.tiles(grid))

    def num_patches(self, grid: Grid) -> int:
        return sum(rows * columns * self.merge**2 for rows, columns in self.tiles(grid))

    def grid_of(self, num_rows: int) -> Grid:
        """Return the grid of a picture with about this many rows."""
        if not self.is_tiled:
            rows = math.isqrt(num_rows)
            return rows, num_rows // rows
        side = self.side // self.merge
        return side * max(1, num_rows // side**2 - 1), side


@dataclass(frozen=True, slots=True)
class PictureArrays:
    """Places of the patches of pictures, in the order in which the blocks have them.

    A lead has a square after those of its picture, and is the first patch of it. The square's other
    patches see each other alone, and are not read."""

    places: Array  # [num_patches, 2] int32, row and column; -1: in the square of a lead
    order: Array  # [num_squares] int32, packed squares; those of a window are together
    back: Array  # [num_rows] int32, square of each row for the decoder
    entries: Array | None  # [num_patches, 4] int32, of learned positions
    weights: Array | None  # [num_patches, 4] fp32
    pictures: Array  # numbers of patches that see each other
    windows: Array  # numbers of patches, one window after the other

    @classmethod
    def of(cls, tower: Tower, grids: Sequence[Grid]) -> PictureArrays:
        """Return the arrays of pictures that are encoded together."""
        first = 0 if tower.table is None else tower.table.first
        rules = tower.merge, tower.window, tower.side, first, tower.lead
        found = [_arrays_of_one(tile, *rules) for grid in grids for tile in tower.tiles(grid)]
        if len(found) == 1:
            return found[0]
        firsts = np.cumsum([0, *(len(one.order) for one in found)])
        shifted = [
            replace(one, order=one.order + first, back=one.back + first)
            for one, first in zip(found, firsts, strict=False)
        ]
        columns = {name: [getattr(one, name) for one in shifted] for name in _NAMES}
        joined: dict[str, Any] = {
            name: None if parts[0] is None else np.concatenate(parts)
            for name, parts in columns.items()
        }
        return cls(**joined)


_NAMES = [field.name for field in fields(PictureArrays)]


@lru_cache(maxsize=64)
def _arrays_of_one(
    grid: Grid, merge: int, window: int, side: int, first: int, lead: Lead | None
) -> PictureArrays:
    """Return the arrays of one picture. side: of the grid of learned positions; 0: none.
    first: entry of the grid's first.

    Windows begin at the top left; those at the other edges are cut (Qwen2.5-VL,
    arXiv:2502.13923, section 2.1.1)."""
    rows, columns = grid
    squares = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
    step = window or max(grid)
    parts = [
        squares[top : top + step, left : left + step].ravel()
        for top in range(0, rows, step)
        for left in range(0, columns, step)
    ]
    order, inside = np.concatenate(parts), np.arange(merge * merge, dtype=np.int32)
    row = (order // columns)[:, None] * merge + inside // merge
    column = (order % columns)[:, None] * merge + inside % merge
    places = np.stack((row.ravel(), column.ravel()), axis=1)
    patches = rows * merge, columns * merge
    entries, weights = _resampled(places, patches, side, first) if side else (None, None)
    windows = np.array([len(part) for part in parts]) * merge * merge
    back = np.argsort(order).astype(np.int32)
    pictures = np.array([len(places)])
    arrays = PictureArrays(places, order, back, entries, weights, pictures, windows)
    return arrays if lead is None else _led(arrays, lead, merge**2)


def _led(arrays: PictureArrays, lead: Lead, square: int) -> PictureArrays:
    """Return the arrays of a picture with a lead. It has the first position, if there are any.

    square: patches of a square."""
    num_squares, more = len(arrays.order), ((0, square), (0, 0))
    entries = weights = None
    if arrays.entries is not None and arrays.weights is not None:
        entries, weights = np.pad(arrays.entries, more), np.pad(arrays.weights, more)
        weights[-square, 0] = 1
    lead_square = np.array([num_squares], np.int32)
    segments = np.array([num_squares * square + 1] + [square - 1] * (square > 1))
    return PictureArrays(
        np.pad(arrays.places, more, constant_values=-1),
        np.concatenate((arrays.order, lead_square)),
        np.concatenate((lead_square, arrays.back)) if lead.is_kept else arrays.back,
        entries,
        weights,
        segments,
        segments,
    )


def _resampled(places: Array, grid: Grid, side: int, first: int) -> tuple[Array, Array]:
    """Return (entries [n, 4], weights [n, 4]) of a table [side · side] for patches of a grid.

    Bilinear, with equal corners: the first and the last patch have the first and the last entry.
    first: entry where the table begins."""
    taps, shares = [], []
    for axis, size in enumerate(grid):
        at = places[:, axis].astype(np.float32) * np.float32(side - 1)
        at /= np.float32(max(size - 1, 1))
        low = np.floor(at).astype(np.int32)
        part = at - low
        taps.append(np.stack((low, np.minimum(low + 1, side - 1)), axis=1))
        shares.append(np.stack((1 - part, part), axis=1))
    entries = first + taps[0][:, :, None] * side + taps[1][:, None, :]
    weights = shares[0][:, :, None] * shares[1][:, None, :]
    return entries.reshape(-1, 4), weights.reshape(-1, 4).astype(np.float32)


def fused(name: str, hidden: int) -> tuple[Source, ...]:
    """Return queries, keys and values that are one tensor, one after the other."""
    return tuple(Source(name, order) for order in consecutive(hidden, hidden, hidden))
