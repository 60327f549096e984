"""A small writer of GGUF files, for any content, also wrong."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from toolkit.gguf.file import TYPES

NUMBERS = {kind.name: number for number, kind in TYPES.items()}


@dataclass(frozen=True)
class Stored:
    """A tensor as it is stored. `kind`: name or number of its type."""

    kind: str | int
    shape: tuple[int, ...]  # rows first
    data: bytes
    offset: int | None = None  # None: after the tensor before


def plain(tensor: torch.Tensor, kind: str = "F32") -> Stored:
    """Return a tensor as it is stored in a plain type."""
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    data = tensor.detach().to(dtype).contiguous().view(torch.uint8).numpy().tobytes()
    return Stored(kind, tuple(tensor.shape), data)


def q8_0(tensor: torch.Tensor) -> Stored:
    """Return matrices in blocks of 32 integers of 8 bits, rounded to nearest."""
    blocks = tensor.detach().float().unflatten(-1, (-1, 32))
    scales = (blocks.abs().amax(-1, keepdim=True) / 127).half()
    values = (blocks / scales.float().clamp(min=1e-9)).round().clamp(-127, 127).to(torch.int8)
    raw = torch.cat((scales.view(torch.uint8), values.view(torch.uint8)), -1)
    return Stored("Q8_0", tuple(tensor.shape), raw.numpy().tobytes())


def write(
    path: Path,
    metadata: Mapping[str, object],
    tensors: Mapping[str, Stored],
    *,
    version: int = 3,
    alignment: int = 32,
) -> Path:
    """Write a file. Python's int is uint32, or int32 if negative, and float is float32."""
    entries = [text(key) + value(one) for key, one in metadata.items()]
    infos, data = [], b""
    for name, tensor in tensors.items():
        number = NUMBERS[tensor.kind] if isinstance(tensor.kind, str) else tensor.kind
        offset = len(data) if tensor.offset is None else tensor.offset
        shape = tensor.shape[::-1]
        infos.append(
            text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, number, offset)
        )
        data = padded(data + tensor.data, alignment)
    head = b"GGUF" + struct.pack("<IQQ", version, len(infos), len(entries))
    path.write_bytes(padded(head + b"".join((*entries, *infos)), alignment) + data)
    return path


def padded(content: bytes, alignment: int) -> bytes:
    return content + bytes(-len(content) % alignment)


def text(string: str) -> bytes:
    encoded = string.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def value(one: object) -> bytes:
    """Return a metadata value after its type."""
    if isinstance(one, str):
        return struct.pack("<I", 8) + text(one)
    if isinstance(one, Sequence):
        own = [value(part) for part in one]
        kind = own[0][:4] if own else struct.pack("<I", 5)
        return (
            struct.pack("<I", 9)
            + kind
            + struct.pack("<Q", len(own))
            + b"".join(part[4:] for part in own)
        )
    if isinstance(one, bool):
        return struct.pack("<I?", 7, one)
    if isinstance(one, float):
        return struct.pack("<If", 6, one)
    assert isinstance(one, int)
    return struct.pack("<Ii", 5, one) if one < 0 else struct.pack("<II", 4, one)
