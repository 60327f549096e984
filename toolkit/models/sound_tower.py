"""A tower for clips, built from its description: samples to rows for tokens of a prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from toolkit.attention.packed import Segments
from toolkit.layers import Join, Linear, Norm
from toolkit.models.audio import CHUNKS_AT_ONCE, LEAST_SAMPLES, SoundTower
from toolkit.models.audio_encoder import LogMel
from toolkit.models.tower import TowerBlock
from toolkit.weights.activation import activation_kind
from toolkit.weights.slots import Slot, Slots
from toolkit.weights.source import Source
from toolkit.weights.weight import parameter

TIMESCALE = 10_000.0  # of the slowest position


class Convolution2d(nn.Module):
    """A convolution of 3 x 3 with steps of 2, and GELU."""

    def __init__(self, source: Source, before: int, channels: int) -> None:
        super().__init__()
        self.source = source
        self.weight = parameter(torch.empty(channels, before, 3, 3))
        self.bias = parameter(torch.empty(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.conv2d(x, self.weight, self.bias, 2, padding=1))

    def slots(self) -> Slots:
        return {
            self.source.tensor("weight"): Slot(self.weight),
            self.source.tensor("bias"): Slot(self.bias),
        }


class SoundTowerModule(nn.Module):
    """Encodes clips of any lengths. Its parameters are uninitialized."""

    def __init__(self, tower: SoundTower) -> None:
        super().__init__()
        self.tower, hidden = tower, tower.hidden
        self.dtype = torch.get_default_dtype()
        self.mel = LogMel(tower.num_mels)
        channels = (1, *[tower.channels] * len(tower.convolutions))
        self.convolutions = nn.ModuleList(
            Convolution2d(source, before, tower.channels)
            for source, before in zip(tower.convolutions, channels, strict=False)
        )
        self.flat = Linear(tower.channels * tower.num_bands, hidden, tower.flat, bias=False)
        self.positions = nn.Buffer(torch.empty(tower.most_rows, hidden, dtype=torch.float32))
        if not self.positions.is_meta:
            self.positions.copy_(_positions(tower.most_rows, hidden))
        self.blocks = nn.ModuleList(
            TowerBlock(block, hidden, tower.num_heads) for block in tower.blocks
        )
        self.norm = Join(hidden, [Norm(**dataclasses.asdict(tower.norm))])
        kind, (up, down) = activation_kind(tower.activation), tower.projection
        self.up = Linear(hidden, hidden, up, bias=True, activation=kind)
        self.down = Linear(hidden, tower.out, down, bias=True)

    def forward(self, clips: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return rows [num_rows, out] of clips [num_samples] each, in fp32, one after the other."""
        tower = self.tower
        chunks, places, lengths, first = [], [], list[int](), 0
        for clip in clips:
            chunks.append(self._chunks(clip))
            rows = tower.num_rows(len(clip))
            places.append(np.arange(first, first + rows))
            windows, rest = divmod(rows, tower.rows_of_window)
            lengths += [tower.rows_of_window] * windows + [rest] * bool(rest)
            first += len(chunks[-1]) * tower.rows_of_chunk
        every = torch.cat(chunks)
        parts = range(0, len(every), CHUNKS_AT_ONCE)
        shrunk = [self._shrink(every[at : at + CHUNKS_AT_ONCE]) for at in parts]
        where = torch.from_numpy(np.concatenate(places)).to(chunks[0].device)
        x = torch.cat(shrunk).index_select(0, where)
        segments = Segments.of(np.array(lengths), x.device, x.dtype)
        residual: torch.Tensor | None = None
        for block in self.blocks:
            x, residual = block(x, residual, None, segments)
        (out,), _ = self.norm(x, residual)
        found: torch.Tensor = self.down(self.up(out))
        return found

    def _chunks(self, clip: torch.Tensor) -> torch.Tensor:
        """Return a clip's spectrogram [chunks, mels, frames of a chunk]; its end is zeros."""
        chunk = self.tower.chunk
        clip = F.pad(clip, (0, max(0, LEAST_SAMPLES - len(clip))))
        (mels,) = self.mel(clip[None])
        mels = F.pad(mels, (0, -mels.shape[1] % chunk))
        return mels.reshape(len(mels), -1, chunk).transpose(0, 1)

    def _shrink(self, chunks: torch.Tensor) -> torch.Tensor:
        """Return rows [chunks · rows of a chunk, hidden] of a spectrogram."""
        x = chunks[:, None].to(self.dtype)
        for convolution in self.convolutions:
            x = convolution(x)
        flat: torch.Tensor = self.flat(x.permute(0, 3, 1, 2).flatten(2).flatten(0, 1))
        rows = self.tower.rows_of_chunk
        placed = flat.view(len(chunks), rows, -1) + self.positions[:rows].to(x.dtype)
        return placed.flatten(0, 1)


def _positions(count: int, hidden: int) -> torch.Tensor:
    """Return sinusoids [count, hidden]: sines first, then cosines."""
    speeds = torch.exp(
        -np.log(TIMESCALE) / (hidden // 2 - 1) * torch.arange(hidden // 2, dtype=torch.float32)
    )
    angles = torch.arange(count, dtype=torch.float32)[:, None] * speeds
    return torch.cat((angles.sin(), angles.cos()), dim=1)
