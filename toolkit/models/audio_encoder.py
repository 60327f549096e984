"""An encoder of clips, built from its description: samples to rows that a decoder attends to."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn

from toolkit.attention.packed import Segments
from toolkit.layers import Embedding, Join, Norm
from toolkit.models.audio import HOP, SAMPLE_RATE, STRIDE, AudioEncoder
from toolkit.models.tower import TowerBlock
from toolkit.weights.slots import Slot, Slots
from toolkit.weights.source import Source
from toolkit.weights.weight import parameter

FFT = 400  # samples of a frame
LEAST_POWER = 1e-10
LINEAR_MELS = 15.0  # mels below 1 kHz, where the scale is linear (Slaney, Auditory Toolbox, 1998)
_DECIBELS = 8.0  # powers of ten below the loudest that are kept


class LogMel(nn.Module):
    """The log-mel spectrogram of clips, scaled as in Whisper's paper, section 2.2, in fp32."""

    def __init__(self, num_mels: int) -> None:
        super().__init__()
        filters = torch.from_numpy(mel_filters(num_mels))
        self.filters = nn.Buffer(torch.empty_like(filters, device=torch.get_default_device()))
        self.window = nn.Buffer(torch.empty(FFT, dtype=torch.float32))
        if not self.filters.is_meta:
            self.filters.copy_(filters)
            self.window.copy_(torch.hann_window(FFT, dtype=torch.float32))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """Return [n, num_mels, num_samples / 160] of samples [n, num_samples] fp32."""
        spectrum = torch.stft(
            samples, FFT, HOP, window=self.window, center=True, return_complex=True
        )
        powers = spectrum[..., :-1].abs().square()
        logs = (self.filters @ powers).clamp_(min=LEAST_POWER).log10_()
        floor = logs.amax((1, 2), keepdim=True) - _DECIBELS
        return (torch.maximum(logs, floor) + 4.0) / 4.0


def mel_filters(num_mels: int) -> npt.NDArray[np.float32]:
    """Return triangular filters [num_mels, 201] of equal area, equally spaced in Slaney's mels."""
    frequencies = np.linspace(0, SAMPLE_RATE / 2, 1 + FFT // 2)
    edges = _frequency(np.linspace(0.0, _mels(SAMPLE_RATE / 2), num_mels + 2))
    widths = np.diff(edges)
    slopes = edges[:, None] - frequencies
    rising, falling = -slopes[:-2] / widths[:-1, None], slopes[2:] / widths[1:, None]
    areas = 2.0 / (edges[2:] - edges[:-2])
    return (np.maximum(0, np.minimum(rising, falling)) * areas[:, None]).astype(np.float32)


def _mels(frequency: float) -> float:
    """Return the mels of a frequency of at least 1 kHz."""
    return LINEAR_MELS + float(np.log(frequency / 1000)) * 27 / float(np.log(6.4))


def _frequency(mels: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    above = 1000 * np.exp(np.log(6.4) / 27 * (mels - LINEAR_MELS))
    return np.where(mels < LINEAR_MELS, mels * 1000 / LINEAR_MELS, above)


class Convolution(nn.Module):
    """A convolution of width 3 over frames, and GELU."""

    def __init__(self, source: Source, channels: int, hidden: int, stride: int) -> None:
        super().__init__()
        self.source, self.stride = source, stride
        self.weight = parameter(torch.empty(hidden, channels, 3))
        self.bias = parameter(torch.empty(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, hidden, frames / stride] of x [n, channels, frames]."""
        return F.gelu(F.conv1d(x, self.weight, self.bias, self.stride, padding=1))

    def slots(self) -> Slots:
        return {
            self.source.tensor("weight"): Slot(self.weight),
            self.source.tensor("bias"): Slot(self.bias),
        }


class AudioEncoderModule(nn.Module):
    """Encodes clips. Its parameters are uninitialized."""

    def __init__(self, encoder: AudioEncoder) -> None:
        super().__init__()
        self.encoder, hidden = encoder, encoder.hidden
        self.dtype = torch.get_default_dtype()
        self.mel = LogMel(encoder.num_mels)
        first, second = encoder.convolutions
        self.first = Convolution(first, encoder.num_mels, hidden, 1)
        self.second = Convolution(second, hidden, hidden, STRIDE)
        self.positions = Embedding(encoder.positions, encoder.num_rows, hidden)
        self.blocks = nn.ModuleList(
            TowerBlock(block, hidden, encoder.num_heads) for block in encoder.blocks
        )
        self.norm = Join(hidden, [Norm(**dataclasses.asdict(encoder.norm))])
        self._segments: dict[int, Segments] = {}  # by number of clips

    @property
    def num_rows(self) -> int:
        """Rows of a clip."""
        return self.encoder.num_rows

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """Return rows [n · num_rows, hidden] of samples [n, num_samples] fp32, from -1 to 1."""
        x = self.second(self.first(self.mel(samples).to(self.dtype)))
        rows: torch.Tensor = self.positions(torch.arange(self.encoder.num_rows, device=x.device))
        x = x.transpose(1, 2).contiguous().add_(rows).flatten(0, 1)
        segments = self._segments_of(len(samples), x)
        residual: torch.Tensor | None = None
        for block in self.blocks:
            x, residual = block(x, residual, None, segments)
        (out,), _ = self.norm(x, residual)
        assert isinstance(out, torch.Tensor), "without a product, rows are complete"
        return out

    def _segments_of(self, count: int, x: torch.Tensor) -> Segments:
        if count not in self._segments:
            lengths = np.full(count, self.encoder.num_rows)
            segments = Segments.of(lengths, x.device, x.dtype)
            self._segments[count] = dataclasses.replace(segments, length=self.encoder.num_rows)
        return self._segments[count]
