"""Runs a tower. On a GPU, the common numbers of patches are CUDA graphs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from toolkit.attention.packed import Segments, has_varlen
from toolkit.hardware.graph_capture import capture
from toolkit.hardware.memory import to_device
from toolkit.models.tower import PictureBatch, TowerModel
from toolkit.models.towers.parts import Grid, PictureArrays
from toolkit.worker.graph_policy import least
from toolkit.worker.step_sizes import MOST_PICTURES, picture_rows

PATCHES_PER_WINDOW = 32  # at least, on average


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured number of patches, and its output. Unused patches are in no segment."""

    graph: torch.cuda.CUDAGraph
    rows: torch.Tensor
    num_ints: int


class PictureEncoder:
    """Computes pictures with a tower."""

    def __init__(self, tower: TowerModel, device: torch.device) -> None:
        self.tower, self.device, self.dtype = tower, device, tower.dtype
        self.row_size, self._description = tower.tower.row_size, tower.tower
        self._no_pixels = bytes(tower.tower.patches.pixels * tower.tower.merge**2)  # of a lead
        self._sizes = picture_rows(tower.tower.fixed_squares)
        self._graphs: dict[int, _Graph] = {}  # by number of squares

    @torch.inference_mode()
    def encode(self, data: Sequence[bytes], grids: Sequence[Grid]) -> torch.Tensor:
        """Return the rows [num_rows, row size] of pictures, one after the other.

        data: pixels as uint8. The result is overwritten by the next call."""
        arrays = PictureArrays.of(self._description, grids)
        if self._description.lead is not None:
            data = self._with_leads(data, grids)
        pixels = np.frombuffer(bytearray().join(data), np.uint8).reshape(len(arrays.places), -1)
        size = least(self._sizes, len(arrays.order))
        graph = None if size is None else self._graphs.get(size)
        if graph is None or not _fits(arrays):
            batch = PictureBatch.of(arrays, self.device, self.tower.dtype)
            rows: torch.Tensor = self.tower(to_device(torch.from_numpy(pixels), self.device), batch)
            return rows
        self._pixels[: len(pixels)] = to_device(torch.from_numpy(pixels), self.device)
        ints = np.concatenate(self._ints(arrays, len(graph.rows)))
        self._packed[: len(ints)] = to_device(torch.from_numpy(ints), self.device)
        if arrays.weights is not None:
            self._weights[: len(pixels)] = to_device(torch.from_numpy(arrays.weights), self.device)
        graph.graph.replay()
        return graph.rows[: len(arrays.back)]

    def _with_leads(self, data: Sequence[bytes], grids: Sequence[Grid]) -> list[bytes]:
        """Return pixels with those of a lead after each tile."""
        found = []
        for one, grid in zip(data, grids, strict=True):
            size = len(one) // len(self._description.tiles(grid))
            for first in range(0, len(one), size):
                found += [one[first : first + size], self._no_pixels]
        return found

    def num_rows(self, grid: Grid) -> int:
        """Return the number of a picture's rows."""
        return self._description.num_rows(grid)

    def rehearse(self, num_rows: int) -> None:
        """Compute a picture of about this many rows, kernel by kernel."""
        grid = self._description.grid_of(num_rows)
        size = self._description.num_patches(grid) * self._description.patches.pixels
        graphs, self._graphs = self._graphs, {}
        self.encode([bytes(size)], [grid])
        self._graphs = graphs

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture a graph for each number of rows, on the current stream."""
        if self._graphs or not self._sizes or not has_varlen(self.device, self.tower.dtype):
            return
        most, square = self._sizes[-1], self._description.merge**2
        patches, device = most * square, self.device
        size = self._description.patches.pixels
        self._pixels = torch.zeros(patches, size, dtype=torch.uint8, device=device)
        self._weights = torch.zeros(patches, 4, dtype=torch.float32, device=device)
        empty = _padding(square, bool(self._description.table))
        length = sum(map(len, self._ints(empty, most)))
        self._packed = torch.zeros(length, dtype=torch.int32, device=device)
        pool: Any = torch.cuda.graph_pool_handle()
        for num_rows in reversed(self._sizes):
            ints = self._ints(empty, num_rows)
            self._packed[: sum(map(len, ints))] = torch.from_numpy(np.concatenate(ints)).to(device)
            batch = self._batch(num_rows, [len(one) for one in ints])
            pixels = self._pixels[: num_rows * square]
            graph, rows = capture(functools.partial(self.tower, pixels, batch), pool)
            self._graphs[num_rows] = _Graph(graph, rows, sum(map(len, ints)))

    def _batch(self, num_rows: int, sizes: Sequence[int]) -> PictureBatch:
        """Return the inputs of a graph, which are parts of the buffers."""
        patches = num_rows * self._description.merge**2
        parts = list(torch.split(self._packed[: sum(sizes)], list(sizes)))
        order, back, places, pictures, windows = parts[:5]
        entries = parts[5].view(-1, 4) if len(parts) > 5 else None
        return PictureBatch(
            places.view(-1, 2),
            order,
            back,
            entries,
            None if entries is None else self._weights[:patches],
            Segments(pictures, patches, []),
            Segments(windows, min(patches, self._description.most_window), []),
        )

    def _ints(self, arrays: PictureArrays, num_rows: int) -> list[npt.NDArray[np.int32]]:
        """Return the integers of a graph, padded: order, back, places, starts and entries."""
        rest = np.arange(len(arrays.order), num_rows, dtype=np.int32)
        unread = np.zeros(num_rows - len(arrays.back), np.int32)
        more = len(rest) * self._description.merge**2
        patches = num_rows * self._description.merge**2
        found = [
            np.concatenate((arrays.order, rest)),
            np.concatenate((arrays.back, unread)),
            np.concatenate((arrays.places.ravel(), np.zeros(2 * more, np.int32))),
            _starts(arrays.pictures, MOST_PICTURES),
            _starts(arrays.windows, _most_windows(patches)),
        ]
        if arrays.entries is not None:
            found.append(np.concatenate((arrays.entries.ravel(), np.zeros(4 * more, np.int32))))
        return found


def _starts(lengths: npt.NDArray[Any], count: int) -> npt.NDArray[np.int32]:
    """Return where segments begin, and the last ends; further ones are empty."""
    starts = np.zeros(count + 1, np.int32)
    np.cumsum(lengths, out=starts[1 : len(lengths) + 1])
    starts[len(lengths) + 1 :] = starts[len(lengths)]
    return starts


def _fits(arrays: PictureArrays) -> bool:
    most = _most_windows(len(arrays.places))
    return len(arrays.pictures) <= MOST_PICTURES and len(arrays.windows) <= most


def _most_windows(num_patches: int) -> int:
    return max(1, num_patches // PATCHES_PER_WINDOW)


def _padding(square: int, has_table: bool) -> PictureArrays:
    """Return arrays without pictures."""
    none = np.zeros(0, np.int32)
    entries = none.reshape(0, 4) if has_table else None
    return PictureArrays(
        none.reshape(0, 2), none, none, entries, None, np.zeros(0, np.int64), np.zeros(0, np.int64)
    )
