"""MXFP4: numbers of 4 bits (e2m1) with a scale (e8m0) for each 32 columns of a row.

Checkpoints have [rows, groups, 16] bytes, each with an even column in its low half and the next
one in the high half, and [rows, groups] scales of a byte s, for 2 ** (s - 127). Kernels read steps
of four groups. A weight is [steps, rows, 32] words of 16 bits, and a step of adjacent rows is one
stretch of memory: word i of a row has column i of each group, with its bits at `PLACES`. Scales are
[steps, rows] words of four bytes. A row ends with groups of zeros that fill its last step. Source:
OCP Microscaling Formats (MX) Specification 1.0."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32  # columns with one scale
GROUPS = 4  # of a step
STEP = GROUP * GROUPS  # columns
MAX_SCALE = 128
"""Largest byte of a scale: 2 times the numbers. Kernels multiply by it in one step."""
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""By their lowest three bits. The highest one is the sign."""
PLACES = ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (11, 13, 14, 10))
"""For each group of a step, the place in a word of each bit of a number, the lowest first. After
one shift, those of the first three are where bf16 has its sign, and the end of its exponent."""


def num_groups(columns: int) -> int:
    """Return the number of groups in a row, with those that fill the last step."""
    return -(-columns // STEP) * GROUPS


def arrange_(blocks: Tensor, scales: Tensor) -> None:
    """Put bytes [rows, groups, 16] and scales [rows, groups] in the order of the kernels, in place.

    Takes 25 times their memory."""
    rows = len(blocks)
    numbers = torch.stack((blocks & 15, blocks >> 4), 3).view(rows, -1, GROUPS, GROUP).int()
    words = torch.zeros_like(numbers[:, :, 0])
    for group, places in enumerate(PLACES):
        for bit, place in enumerate(places):
            words |= (numbers[:, :, group] >> bit & 1) << place
    blocks.view(-1).view(torch.int16).view(-1, rows, GROUP).copy_(words.transpose(0, 1))
    exponents = scales.view(-1).view(torch.int32)
    exponents.view(-1, rows).copy_(exponents.view(rows, -1).T.clone())


def decode(numbers: Tensor) -> Tensor:
    """Return the numbers, in fp32, that integers of 4 bits stand for."""
    signed = torch.tensor((*NUMBERS, *(-one for one in NUMBERS)), device=numbers.device)
    return signed[numbers.long()]


def encode(values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return integers of 4 bits, and bytes of scales.

    values: uint8, twice the numbers, plus 128; scales: bf16 powers of two, for `values` - 128."""
    numbers = torch.arange(16, device=values.device)
    numbers = numbers[numbers != 8]  # -0
    table = torch.zeros(256, dtype=torch.uint8, device=values.device)
    table[(2 * decode(numbers) + 128).long()] = numbers.byte()
    bits = scales.view(torch.int16)
    exponents = torch.where(bits < 1 << 7, (bits >> 5) - 1, (bits >> 7) + 1)
    return table[values.long()], exponents.byte()


def dequantize(words: Tensor, scales: Tensor) -> Tensor:
    """Return fp32 [rows, columns] of int16 [steps, rows, 32] and int32 [steps, rows] of kernels."""
    wide = words.transpose(0, 1).int()
    bits = [[wide >> place & 1 for place in places] for places in PLACES]
    numbers = torch.stack([a | b << 1 | c << 2 | d << 3 for a, b, c, d in bits], 2)
    exponents = torch.stack([scales.T >> 8 * i & 255 for i in range(GROUPS)], 2)
    return (decode(numbers) * torch.exp2(exponents.float() - 127)[..., None]).flatten(1)
