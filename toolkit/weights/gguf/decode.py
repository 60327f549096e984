"""Decode blocks of GGUF's quantized types to the layout of `Groups`. All of them fit it exactly.

A row is a sequence of blocks. A block holds the values of 32 or 256 columns and their scales. In
types with a K, scales are themselves integers of 4 to 8 bits with one fp16 scale for the block:
the product fits fp32 exactly (at most 11 + 7 bits), and so does its product with a value, except
that an offset is added with one rounding, in the format as here.
Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from toolkit.gguf.file import TYPES
from toolkit.weights.groups import Groups, pack_nibbles

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Values of IQ4_NL and IQ4_XS."""
_FP4_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Values of FP4 (e2m1), doubled."""


class _Blocks(NamedTuple):
    """Decoded blocks. The leading dimensions are rows and blocks of a row."""

    bits: int
    values: torch.Tensor  # uint8 [rows, blocks, columns of a block]
    scales: torch.Tensor  # [rows, blocks, groups of a block]
    offsets: torch.Tensor | None = None


def decode(type_name: str, raw: torch.Tensor, columns: int) -> Groups | torch.Tensor:
    """Decode rows of a tensor, uint8 [rows, bytes per row], on the device where they are.

    Returns [rows, columns] in fp32 for a plain type, and groups of 16 or 32 columns for others."""
    if type_name in PLAIN:
        return raw.contiguous().view(PLAIN[type_name]).float()
    kind = next(kind for kind in TYPES.values() if kind.name == type_name)
    blocks = _DECODERS[type_name](raw.view(len(raw), columns // kind.block, kind.num_bytes))
    values = blocks.values.flatten(1)
    offsets = None if blocks.offsets is None else blocks.offsets.flatten(1)
    return Groups(
        blocks.bits,
        pack_nibbles(values) if blocks.bits == 4 else values,
        blocks.scales.flatten(1),
        offsets,
    )


def dequantize(type_name: str, raw: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the rows of a tensor in fp32. Parameters are those of `decode`."""
    decoded = decode(type_name, raw, columns)
    return decoded.dequantize() if isinstance(decoded, Groups) else decoded


def _q4_0(blocks: torch.Tensor) -> _Blocks:
    scale, values = _fields(blocks, 2, 16)
    return _Blocks(4, _spread(values, 16, (0, 4)), _fp16(scale))


def _q4_1(blocks: torch.Tensor) -> _Blocks:
    scale, minimum, values = _fields(blocks, 2, 2, 16)
    return _Blocks(4, _spread(values, 16, (0, 4)), _fp16(scale), _fp16(minimum))


def _q5_0(blocks: torch.Tensor) -> _Blocks:
    scale, high, low = _fields(blocks, 2, 4, 16)
    return _Blocks(8, _five_bits(low, 16, high, 1) + (128 - 16), _fp16(scale))


def _q5_1(blocks: torch.Tensor) -> _Blocks:
    scale, minimum, high, low = _fields(blocks, 2, 2, 4, 16)
    return _Blocks(8, _five_bits(low, 16, high, 1), _fp16(scale), _fp16(minimum))


def _q8_0(blocks: torch.Tensor) -> _Blocks:
    scale, values = _fields(blocks, 2, 32)
    return _Blocks(8, values ^ 128, _fp16(scale))  # from two's complement


def _q2_k(blocks: torch.Tensor) -> _Blocks:
    scales, values, scale, minimum = _fields(blocks, 16, 64, 2, 2)
    own, minima = scales & 15, scales >> 4
    return _Blocks(
        4,
        _spread(values, 32, (0, 2, 4, 6)),
        _fp16(scale).float() * own,
        -(_fp16(minimum).float() * minima),
    )


def _q3_k(blocks: torch.Tensor) -> _Blocks:
    high, low, scales, scale = _fields(blocks, 32, 64, 12, 2)
    values = _spread(low, 32, (0, 2, 4, 6)) | _spread(high, 32, range(8)) << 2
    own = _spread(scales[..., :8], 8, (0, 4)) | _spread(scales[..., 8:], 4, (0, 2, 4, 6)) << 4
    return _Blocks(4, values + (8 - 4), _fp16(scale).float() * (own.float() - 32))


def _q4_k(blocks: torch.Tensor) -> _Blocks:
    head, values = _fields(blocks, 16, 128)
    return _Blocks(4, _spread(values, 32, (0, 4)), *_scales_and_offsets(head))


def _q5_k(blocks: torch.Tensor) -> _Blocks:
    head, high, low = _fields(blocks, 16, 32, 128)
    return _Blocks(8, _five_bits(low, 32, high, 32), *_scales_and_offsets(head))


def _q6_k(blocks: torch.Tensor) -> _Blocks:
    low, high, scales, scale = _fields(blocks, 128, 64, 16, 2)
    values = _spread(low, 64, (0, 4)) | _spread(high, 32, (0, 2, 4, 6)) << 4
    own = scales.contiguous().view(torch.int8)
    return _Blocks(8, values + (128 - 32), _fp16(scale).float() * own)


def _iq4_nl(blocks: torch.Tensor) -> _Blocks:
    scale, values = _fields(blocks, 2, 16)
    return _Blocks(8, _levels(values, _LEVELS), _fp16(scale))


def _iq4_xs(blocks: torch.Tensor) -> _Blocks:
    scale, high, low, values = _fields(blocks, 2, 2, 4, 128)
    own = _spread(low, 1, (0, 4)) | _spread(high, 1, (0, 2, 4, 6)) << 4
    return _Blocks(8, _levels(values, _LEVELS), _fp16(scale).float() * (own.float() - 32))


def _mxfp4(blocks: torch.Tensor) -> _Blocks:
    """Decode FP4 values that share an exponent. The scale is 2 ** (exponent - 128), as bf16."""
    exponent, values = _fields(blocks, 1, 16)
    exponent = exponent.to(torch.int16)
    bits = torch.where(exponent < 2, 0x20 << exponent.clamp(max=1), (exponent - 1) << 7)
    return _Blocks(8, _levels(values, _FP4_LEVELS), bits.to(torch.int16).view(torch.bfloat16))


_DECODERS: dict[str, Callable[[torch.Tensor], _Blocks]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}


def _fields(blocks: torch.Tensor, *sizes: int) -> tuple[torch.Tensor, ...]:
    """Return the parts of blocks by their sizes in bytes."""
    return torch.split(blocks, list(sizes), 2)


def _fp16(part: torch.Tensor) -> torch.Tensor:
    return part.contiguous().view(torch.float16)


def _spread(part: torch.Tensor, size: int, shifts: Sequence[int]) -> torch.Tensor:
    """Return integers of less than 8 bits that share bytes.

    Each run of `size` bytes holds one run of integers for each shift, of the shifts' distance in
    bits. They follow each other in the result."""
    amounts = torch.tensor(shifts, dtype=torch.uint8, device=part.device)
    runs = part.reshape(*part.shape[:2], -1, 1, size) >> amounts[:, None]
    return torch.flatten(runs & 2 ** (8 // len(shifts)) - 1, 2)


def _five_bits(
    low: torch.Tensor, low_size: int, high: torch.Tensor, high_size: int
) -> torch.Tensor:
    """Join four low bits and one high bit. The sizes are those of `_spread`."""
    return _spread(low, low_size, (0, 4)) | _spread(high, high_size, range(8)) << 4


def _scales_and_offsets(head: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the eight scales and offsets of a block of Q4_K or Q5_K, in fp32.

    They are 6 bits each in 12 bytes: the low 6 bits of bytes 0 to 7 are the first four scales and
    minima; those of the others are in bytes 8 to 11, and their high bits in bytes 0 to 7."""
    scale, minimum, packed = _fields(head, 2, 2, 12)
    first, second, third = _fields(packed, 4, 4, 4)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), 2)
    minima = torch.cat((second & 63, third >> 4 | second >> 6 << 4), 2)
    return _fp16(scale).float() * scales, -(_fp16(minimum).float() * minima)


def _levels(part: torch.Tensor, levels: Sequence[int]) -> torch.Tensor:
    """Return values of a table, plus 128, by four bits each."""
    table = torch.tensor([128 + level for level in levels], dtype=torch.uint8, device=part.device)
    return table[_spread(part, 16, (0, 4)).int()]
