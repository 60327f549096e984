"""Integer weights with a scale for each group of columns: the layout that most formats share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Groups:
    """A weight [rows, columns] of integers of 4 or 8 bits, in groups of consecutive columns.

    It is scales · (values - 2 ** (bits - 1)), or scales · values + offsets if there are offsets."""

    bits: int
    values: torch.Tensor
    """uint8: [rows, columns] of 8 bits; [rows, columns / 2] of 4 bits, the even column in the low
    half."""
    scales: torch.Tensor  # [rows, columns / group size], any floating type
    offsets: torch.Tensor | None = None  # like the scales

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns * 8 // self.bits

    @property
    def size(self) -> int:
        """Columns of a group."""
        return self.shape[1] // self.scales.shape[1]

    @property
    def nbytes(self) -> int:
        return sum(
            part.nbytes for part in (self.values, self.scales, self.offsets) if part is not None
        )

    def integers(self) -> torch.Tensor:
        """Return the values as uint8 [rows, columns]."""
        if self.bits == 8:
            return self.values
        return torch.stack((self.values & 15, self.values >> 4), dim=2).flatten(1)

    def dequantize(self) -> torch.Tensor:
        """Return the weight in fp32. Exact for scales and offsets of 16 bits."""
        grouped = self.integers().float().unflatten(1, (-1, self.size))
        scales = self.scales.float()[:, :, None]
        if self.offsets is None:
            return (scales * (grouped - 2 ** (self.bits - 1))).flatten(1)
        return (scales * grouped + self.offsets.float()[:, :, None]).flatten(1)

    def select(self, rows: slice | torch.Tensor) -> Groups:
        """Return some rows."""
        offsets = None if self.offsets is None else self.offsets[rows]
        return replace(self, values=self.values[rows], scales=self.scales[rows], offsets=offsets)


def pack_nibbles(values: torch.Tensor) -> torch.Tensor:
    """Pack integers of 4 bits [rows, columns], uint8, two in a byte."""
    return values[:, 0::2] | values[:, 1::2] << 4
