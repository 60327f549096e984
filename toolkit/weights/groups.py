"""Integer weights with a scale for each group of columns: the layout that most formats share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

HALF_MAX = 65504.0
RANDOM_CHUNK = 2**24  # elements that are filled at a time: their copies take little memory


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
    order: torch.Tensor | None = None
    """int32 [columns]: the weight's own column of each of these. None: the same."""

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
        grouped = self.integers().float().view(len(self.values), -1, self.size)
        scales = self.scales.float()[:, :, None]
        if self.offsets is None:
            weight: torch.Tensor = (scales * (grouped - 2 ** (self.bits - 1))).flatten(1)
        else:
            weight = (scales * grouped + self.offsets.float()[:, :, None]).flatten(1)
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.order.long(), weight)

    def columns(self, first: int, count: int) -> Groups:
        """Return some columns. Raises ValueError if they cut a group."""
        size = self.size
        if first % size or count % size:
            raise ValueError(f"a part of {count} columns cuts groups of {size}")
        groups = slice(first // size, (first + count) // size)
        values = slice(first * self.bits // 8, (first + count) * self.bits // 8)
        offsets = None if self.offsets is None else self.offsets[:, groups]
        return replace(
            self, values=self.values[:, values], scales=self.scales[:, groups], offsets=offsets
        )

    def reordered(self, columns: list[int]) -> Groups:
        """Return columns in this order. Raises ValueError if a group's columns are not together."""
        size = self.size
        begins = columns[::size]
        together = [begin + i for begin in begins for i in range(size)]
        if columns != together or any(begin % size for begin in begins):
            raise ValueError(f"the order of its columns cuts groups of {size}")
        groups = torch.tensor(begins, device=self.values.device) // size
        offsets = None if self.offsets is None else self.offsets[:, groups]
        by_group = self.values.view(len(self.values), self.scales.shape[1], -1)
        values = by_group[:, groups].flatten(1)
        return replace(self, values=values, scales=self.scales[:, groups], offsets=offsets)

    def select(self, rows: slice | torch.Tensor) -> Groups:
        """Return some rows."""
        offsets = None if self.offsets is None else self.offsets[rows]
        return replace(self, values=self.values[rows], scales=self.scales[rows], offsets=offsets)


def select(decoded: Decoded, rows: torch.Tensor) -> Decoded:
    """Return some rows of a decoded weight."""
    if isinstance(decoded, torch.Tensor):
        return decoded[rows]
    if isinstance(decoded, Groups):
        return decoded.select(rows)
    height, width = decoded.block
    values = decoded.values.view(torch.int8)[rows].view(decoded.values.dtype)
    scales = decoded.scales[rows // height]
    blocks = scales[::height]
    if torch.equal(blocks.repeat_interleave(height, 0)[: len(scales)], scales):
        return Blocks(values, blocks, (height, width))
    return Blocks(values, scales, (1, width))


def pack_nibbles(values: torch.Tensor) -> torch.Tensor:
    """Pack integers of 4 bits [rows, columns], uint8, two in a byte."""
    return values[:, 0::2] | values[:, 1::2] << 4


@dataclass(frozen=True, slots=True)
class Blocks:
    """A weight [rows, columns] in FP8 (e4m3) with an fp32 scale for each block of it."""

    values: torch.Tensor
    scales: torch.Tensor  # [blocks of rows, blocks of columns]
    block: tuple[int, int]  # rows and columns; the last block of each may be smaller

    def dequantize(self) -> torch.Tensor:
        """Return the weight in fp32."""
        rows, columns = self.values.shape
        scales = self.scales.repeat_interleave(self.block[0], 0)[:rows]
        return self.values.float() * scales.repeat_interleave(self.block[1], 1)[:, :columns]


Decoded = Groups | Blocks | torch.Tensor
"""A weight as a checkpoint stores it. A tensor is rounded to the type of the model."""


def quantize(weight: torch.Tensor, bits: int, size: int) -> Groups:
    """Round a weight [rows, columns] to the nearest integers, in groups of `size` columns.

    The largest number of a group becomes the least integer, which is one step further from the
    middle than the greatest."""
    grouped = weight.float().reshape(len(weight), -1, size)
    middle = 2 ** (bits - 1)
    largest = grouped.gather(2, grouped.abs().argmax(2, keepdim=True))
    scales = (largest / -middle).clamp(-HALF_MAX, HALF_MAX).half()
    factors = torch.where(scales == 0, 0.0, 1 / scales.float())
    values = (grouped * factors).round().add(middle).clamp(0, 2 * middle - 1).to(torch.uint8)
    flat = values.flatten(1)
    return Groups(bits, pack_nibbles(flat) if bits == 4 else flat, scales[:, :, 0])


def multiplied(numbers: torch.Tensor, rows: slice, factor: float) -> torch.Tensor:
    """Multiply rows, in place, or in fp32 if their type is too narrow for the products."""
    wide = numbers[rows].float() * factor
    if not torch.equal(wide.to(numbers.dtype).float(), wide):
        numbers = numbers.float()
    numbers[rows] = wide.to(numbers.dtype)
    return numbers


def fill_randomly_(values: torch.Tensor, bits: int, generator: torch.Generator) -> None:
    """Fill bytes or words with random integers of `bits` whose mean is the middle.

    Else the weights' mean would not be 0, and the outputs of few layers alike for all tokens. Of 4
    bits, 0 becomes the middle; of 8, it changes little."""
    limits = torch.iinfo(values.dtype)
    ones = int("1" * (2 * values.itemsize), 16)
    for part in torch.split(values.view(-1), RANDOM_CHUNK):
        part.random_(limits.min, limits.max + 1, generator=generator)
        if bits == 4:
            used = part | (part >> 1) | (part >> 2) | (part >> 3)
            part |= (~used & ones) << 3
