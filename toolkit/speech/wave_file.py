"""WAV files, without a library: their header may be that of a pipe, and their end missing."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit.zygote.worker import RefusedError

MAX_CHANNELS = 64
_BLOCK = 2**18  # samples of a block, of all channels
_MAX_LEVEL = 1000.0  # of floats: 1.0 is full scale
_MAX_CHUNKS = 1000  # in front of the samples
_UNKNOWN_SIZES = (0, 2**32 - 1)  # of samples that were written to a pipe
_PCM, _FLOAT, _A_LAW, _MU_LAW, _EXTENSIBLE = 1, 3, 6, 7, 0xFFFE
Block = npt.NDArray[Any]  # int16 or float32 samples from -1 to 1: [n, channels]


class SoundError(RefusedError):
    """A file that cannot be decoded. The message follows the name of its parameter."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """The chunk `fmt `."""

    tag: int
    channels: int
    rate: int
    frame_bytes: int  # of a sample of each channel

    @property
    def width(self) -> int:
        """Bytes of a sample. Of fewer bits, the lowest bits are 0."""
        return self.frame_bytes // self.channels


def read_wave(data: memoryview) -> Iterator[tuple[int, Block]]:
    """Yield (rate, samples) of blocks of a file. Raises SoundError.

    If the header has no size of the samples, or the file ends before, they go on to its end."""
    layout, samples = _find(data)
    read = _reader(layout)
    step = _BLOCK // layout.channels * layout.frame_bytes
    end = len(samples) // layout.frame_bytes * layout.frame_bytes
    for start in range(0, end, step):
        block = read(samples[start : min(start + step, end)])
        yield layout.rate, block.reshape(-1, layout.channels)


def plain_samples(data: bytes, rate: int) -> npt.NDArray[np.int16] | None:
    """Return the samples of a mono file of 16 bits and a rate, which is only a copy of them.

    None for other files, and for damaged ones."""
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return None
    try:
        layout, samples = _find(memoryview(data))
    except SoundError:
        return None
    if layout != _Layout(_PCM, 1, rate, 2):
        return None
    count = len(samples) // 2
    return np.frombuffer(samples[: 2 * count], "<i2").astype(np.int16, copy=False)


def _find(data: memoryview) -> tuple[_Layout, memoryview]:
    """Return the layout and the bytes of the samples."""
    layout = None
    place = 12  # after RIFF, a size and WAVE
    for _ in range(_MAX_CHUNKS):
        if place + 8 > len(data):
            break
        name, size = struct.unpack_from("<4sI", data, place)
        place += 8
        if name == b"fmt ":
            layout = _read_layout(data[place : place + size])
        elif name == b"data":
            if layout is None:
                break
            return layout, data[place:] if size in _UNKNOWN_SIZES else data[place : place + size]
        place += size + size % 2
    missing = "samples" if layout else "format"
    raise SoundError(f"is a WAV file that is truncated or damaged: it has no {missing}")


def _read_layout(chunk: memoryview) -> _Layout:
    if len(chunk) < 16:
        raise SoundError("is a WAV file that is truncated or damaged: its format is too short")
    tag, channels, rate, _, frame_bytes, bits = struct.unpack_from("<HHIIHH", chunk)
    if tag == _EXTENSIBLE and len(chunk) >= 26:
        (tag,) = struct.unpack_from("<H", chunk, 24)  # first bytes of the sub-format
    if not 1 <= channels <= MAX_CHANNELS:
        raise SoundError(f"is a WAV file of {channels} channels; 1 to {MAX_CHANNELS} are supported")
    layout = _Layout(tag, channels, rate, frame_bytes)
    if frame_bytes % channels or (tag, layout.width) not in _READERS:
        raise SoundError(
            f"is a WAV file of format {tag:#x} with {bits} bits; PCM of 8, "
            "16, 24 and 32 bits, floats of 32 and 64 bits, A-law and µ-law are supported"
        )
    return layout


def _reader(layout: _Layout) -> Callable[[memoryview], Block]:
    return _READERS[layout.tag, layout.width]


def _read_8_bits(data: memoryview) -> Block:
    return (np.frombuffer(data, np.uint8).astype(np.int16) - 128) << 8


def _read_16_bits(data: memoryview) -> Block:
    return np.frombuffer(data, "<i2")


def _read_24_bits(data: memoryview) -> Block:
    wide = np.zeros((len(data) // 3, 4), np.uint8)
    wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
    return _read_32_bits(wide.reshape(-1).data)


def _read_32_bits(data: memoryview) -> Block:
    return np.frombuffer(data, "<i4").astype(np.float32) * np.float32(2**-31)


def _read_floats(data: memoryview, kind: str) -> Block:
    return to_finite(np.frombuffer(data, kind))


def to_finite(samples: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Return floats whose sums are finite, too. What is not a number is silence."""
    limited: npt.NDArray[Any] = np.clip(np.nan_to_num(samples), -_MAX_LEVEL, _MAX_LEVEL)
    return limited.astype(np.float32, copy=False)


def _read_mu_law(data: memoryview) -> Block:
    return _mu_law()[np.frombuffer(data, np.uint8)]


def _read_a_law(data: memoryview) -> Block:
    return _a_law()[np.frombuffer(data, np.uint8)]


_READERS: dict[tuple[int, int], Callable[[memoryview], Block]] = {
    (_PCM, 1): _read_8_bits,
    (_PCM, 2): _read_16_bits,
    (_PCM, 3): _read_24_bits,
    (_PCM, 4): _read_32_bits,
    (_FLOAT, 4): functools.partial(_read_floats, kind="<f4"),
    (_FLOAT, 8): functools.partial(_read_floats, kind="<f8"),
    (_A_LAW, 1): _read_a_law,
    (_MU_LAW, 1): _read_mu_law,
}
"""Readers of samples by format and bytes."""


@functools.cache
def _mu_law() -> npt.NDArray[np.int16]:
    """Values of the 256 codes (ITU-T G.711)."""
    codes = ~np.arange(256) & 0xFF
    sizes = (((codes & 0x0F) << 3) + 0x84 << ((codes & 0x70) >> 4)) - 0x84
    values: npt.NDArray[np.int16] = np.where(codes & 0x80, -sizes, sizes).astype(np.int16)
    return values


@functools.cache
def _a_law() -> npt.NDArray[np.int16]:
    """Values of the 256 codes (ITU-T G.711)."""
    codes = np.arange(256) ^ 0x55
    segments = (codes & 0x70) >> 4
    sizes = ((codes & 0x0F) << 4) + np.where(segments, 0x108, 8) << np.maximum(segments - 1, 0)
    values: npt.NDArray[np.int16] = np.where(codes & 0x80, sizes, -sizes).astype(np.int16)
    return values
