"""Long sound in windows that a model hears at once, cut where it is quiet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from toolkit.speech.clip import SAMPLE_RATE, Clip

SECONDS = 30.0  # longest window
SEARCHED = 1.0  # last seconds of a window in which it may end
_BLOCK = 100  # samples; a window ends between two blocks
_BLOCKS_IN_FRAME = 16  # of 0.1 s, whose energies are compared

TimedClip = tuple[float, Clip]
"""A window: its start in seconds, and its sound."""


class Windows(Sequence[TimedClip]):
    """Windows of a file. A clip is copied from the samples when it is asked for."""

    def __init__(self, samples: npt.NDArray[Any], bounds: Sequence[tuple[int, int]]) -> None:
        """bounds: (first sample, sample after the last) of each window."""
        self._samples, self._bounds = samples, bounds

    @property
    def seconds(self) -> float:
        """Length of the file."""
        return len(self._samples) / SAMPLE_RATE

    def __len__(self) -> int:
        return len(self._bounds)

    @overload
    def __getitem__(self, index: int) -> TimedClip: ...
    @overload
    def __getitem__(self, index: slice) -> list[TimedClip]: ...
    def __getitem__(self, index: int | slice) -> TimedClip | list[TimedClip]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        start, stop = self._bounds[index]
        return start / SAMPLE_RATE, Clip.of(self._samples[start:stop])


def split_windows(samples: npt.NDArray[Any], seconds: float = SECONDS) -> Windows:
    """Return (start in seconds, clip) of windows of at most `seconds`, which cover all samples.

    samples: [n] at 16 kHz, int16 or floats. A window ends in the middle of the quietest 0.1 s of
    its last second, the latest of several, unless the rest is one window."""
    bounds = []
    start, most = 0, int(seconds * SAMPLE_RATE)
    while start < len(samples):
        stop = len(samples)
        if stop - start > most:
            first = start + most - int(SEARCHED * SAMPLE_RATE)
            stop = first + _quietest(samples[first : start + most])
        bounds.append((start, stop))
        start = stop
    return Windows(samples, bounds)


def _quietest(samples: npt.NDArray[Any]) -> int:
    """Return the middle of the quietest frame, in samples."""
    kind = np.int64 if samples.dtype == np.int16 else np.float64
    energies = np.square(samples.reshape(-1, _BLOCK), dtype=kind).sum(axis=1)
    frames = np.lib.stride_tricks.sliding_window_view(energies, _BLOCKS_IN_FRAME).sum(axis=1)
    latest = len(frames) - 1 - int(np.argmin(frames[::-1]))
    return (latest + _BLOCKS_IN_FRAME // 2) * _BLOCK
