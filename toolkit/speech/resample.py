"""Sound of any rate at 16 kHz: a polyphase filter, a sinc in a Kaiser window.

The filter is flat up to 0.9 of the lower Nyquist frequency (7.2 kHz from 16 kHz on) and 80 dB down
from that frequency on. For usual rates, several outputs are one product of a window of the input
and a band matrix, which is faster than the fewer operations of a filter for each phase."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit.errors import InvalidRequestError
from toolkit.speech.clip import SAMPLE_RATE

Samples = npt.NDArray[np.float32]

MIN_RATE, MAX_RATE = 1_000, 384_000
_STOP_DB = 80.0
_FLAT = 0.9  # of the lower Nyquist frequency
_MAX_STEP = 2_000  # largest number of a ratio with a band matrix; usual rates have 640 at most
_PHASES = 4096
"""Filters for other rates, at 16 kHz: an output has the nearest, which is less than -68 dB off."""
_OUTPUTS = 96  # of a product, about
_BATCH = 2**20  # numbers of the windows of a product


def resample(samples: npt.NDArray[Any], rate: int) -> Samples:
    """Return samples [n] of a rate in Hz at 16 kHz, as floats: [ceil(n * 16000 / rate)].

    Raises InvalidRequestError for other rates than MIN_RATE to MAX_RATE."""
    if not MIN_RATE <= rate <= MAX_RATE:
        raise InvalidRequestError(
            f"Sound has {rate:,} samples per second; {MIN_RATE:,} to {MAX_RATE:,} are supported."
        )
    resampler = Resampler(rate)
    return np.concatenate([resampler.feed(samples.astype(np.float32)), resampler.finish()])


class Resampler:
    """Resamples sound that comes in pieces."""

    def __init__(self, rate: int) -> None:
        """`rate`: in Hz, from MIN_RATE to MAX_RATE."""
        ratio = Fraction(SAMPLE_RATE, rate)
        self._up, self._down = ratio.numerator, ratio.denominator
        self._num_in = self._num_out = 0
        self._filter: _Banded | _Gathered | None = None
        if ratio != 1:
            is_usual = max(self._up, self._down) <= _MAX_STEP
            self._filter = (_Banded if is_usual else _Gathered)(_Sinc(self._up, self._down))
            self._rest = np.zeros(self._filter.half, np.float32)

    def feed(self, samples: Samples) -> Samples:
        """Return the outputs that the next samples complete."""
        self._num_in += len(samples)
        if self._filter is None:
            return samples
        self._rest = np.concatenate([self._rest, samples])
        missing = len(self._rest) - self._filter.width
        return self._take(self._filter, max(0, missing // self._filter.step_in + 1))

    def finish(self) -> Samples:
        """Return the last outputs. Silence follows the sound."""
        missing = -(-self._num_in * self._up // self._down) - self._num_out
        if self._filter is None or missing <= 0:
            return np.zeros(0, np.float32)
        num_windows = -(-missing // self._filter.step_out)
        needed = (num_windows - 1) * self._filter.step_in + self._filter.width
        padding = np.zeros(max(0, needed - len(self._rest)), np.float32)
        self._rest = np.concatenate([self._rest, padding])
        return self._take(self._filter, num_windows)[:missing]

    def _take(self, filter_: _Banded | _Gathered, num_windows: int) -> Samples:
        """Return the outputs of the next windows, which are in the rest."""
        if num_windows == 0:
            return np.zeros(0, np.float32)
        windows = np.lib.stride_tricks.sliding_window_view(self._rest, filter_.width)
        found = filter_.apply(windows[:: filter_.step_in][:num_windows])
        self._rest = self._rest[num_windows * filter_.step_in :]
        self._num_out += len(found)
        return found


class _Sinc:
    """A low-pass filter for outputs at any place of the input."""

    def __init__(self, up: int, down: int) -> None:
        self.up, self.down = up, down
        self.lower = min(1.0, up / down)  # Nyquist frequency, in those of the input
        self._transition = (1.0 - _FLAT) * self.lower
        # Kaiser's formula for the length of the filter.
        self.half = int(np.ceil((_STOP_DB - 7.95) / (2.285 * np.pi * self._transition) / 2))

    def taps(self, parts: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the filters of outputs that are parts of a sample after one: [n, 2 * half].

        The last tap is for the sample `half` after that one."""
        offsets = np.arange(1 - self.half, self.half + 1) - parts[:, None]
        cutoff = self.lower - self._transition / 2
        beta = 0.1102 * (_STOP_DB - 8.7)
        window = np.i0(beta * np.sqrt(np.maximum(0.0, 1.0 - (offsets / self.half) ** 2)))
        taps: npt.NDArray[np.float64] = np.sinc(cutoff * offsets) * window
        taps /= taps.sum(axis=1, keepdims=True)  # a constant stays
        return taps


class _Banded:
    """Makes several periods of outputs by one product."""

    def __init__(self, sinc: _Sinc) -> None:
        repeats = -(-_OUTPUTS // sinc.up)
        self.half = sinc.half
        self.step_in, self.step_out = repeats * sinc.down, repeats * sinc.up
        self.width = self.step_in + 2 * sinc.half
        places = np.arange(self.step_out) * sinc.down
        index = (places // sinc.up)[:, None] + np.arange(1, 2 * sinc.half + 1)
        self._matrix = np.zeros((self.width, self.step_out), np.float32)
        taps = sinc.taps(places % sinc.up / sinc.up)
        self._matrix[index, np.arange(self.step_out)[:, None]] = taps

    def apply(self, windows: Samples) -> Samples:
        """Return the outputs of windows: [n, width] -> [n * step_out]."""
        found = np.empty((len(windows), self.step_out), np.float32)
        batch = max(1, _BATCH // self.width)
        for start in range(0, len(windows), batch):
            part = np.ascontiguousarray(windows[start : start + batch])
            np.matmul(part, self._matrix, out=found[start : start + batch])
        return found.reshape(-1)


class _Gathered:
    """Makes each output with the nearest of some filters, for periods of any length."""

    def __init__(self, sinc: _Sinc) -> None:
        num_phases = int(np.ceil(_PHASES * sinc.lower))
        self.half = sinc.half
        self.step_in, self.step_out = sinc.down, sinc.up
        self.width = self.step_in + 2 * sinc.half
        # Rounded to the nearest phase, which may be the first of the next sample.
        places = (np.arange(sinc.up) * sinc.down * num_phases * 2 + sinc.up) // (2 * sinc.up)
        self._first, self._phases = places // num_phases + 1, places % num_phases
        self._taps = sinc.taps(np.arange(num_phases) / num_phases).astype(np.float32)

    def apply(self, windows: Samples) -> Samples:
        """Return the outputs of windows: [n, width] -> [n * step_out]."""
        found = np.empty((len(windows), self.step_out), np.float32)
        batch = max(1, _BATCH // self._taps.shape[1])
        inputs = np.lib.stride_tricks.sliding_window_view(windows, self._taps.shape[1], axis=1)
        for number in range(len(windows)):
            for start in range(0, self.step_out, batch):
                part = slice(start, start + batch)
                found[number, part] = np.einsum(
                    "nt,nt->n",
                    inputs[number, self._first[part]],
                    self._taps[self._phases[part]],
                )
        return found.reshape(-1)
