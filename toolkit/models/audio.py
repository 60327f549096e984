"""Descriptions of encoders of clips. Import no torch.

Whisper's (Radford et al., 2022, arXiv:2212.04356), whose rows a decoder attends to, and Qwen3-ASR's
(Qwen3-Omni, arXiv:2509.17765), whose rows stand for tokens of the prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from toolkit.models.describe import Norm, Parameter
from toolkit.models.towers.parts import Block
from toolkit.weights.source import Source

SAMPLE_RATE = 16_000  # of clips
HOP = 160  # samples from one frame of a spectrogram to the next
STRIDE = 2  # frames for each row


@dataclass(frozen=True, slots=True)
class AudioEncoder:
    """Two convolutions of a log-mel spectrogram, positions, blocks, and a norm."""

    module: ClassVar[str] = "toolkit.models.audio_encoder:AudioEncoderModule"
    num_mels: int
    hidden: int
    num_heads: int
    num_rows: int  # of a clip
    convolutions: tuple[Source, Source]  # of width 3; the second has steps of 2
    positions: str  # name of the table
    blocks: Sequence[Block]
    norm: Norm

    @property
    def num_samples(self) -> int:
        """Samples of the longest clip; shorter ones are padded with silence."""
        return self.num_rows * STRIDE * HOP

    def parameters(self) -> Iterator[Parameter]:
        """Yield the tensors of a checkpoint."""
        hidden = self.hidden
        for source, channels in zip(self.convolutions, (self.num_mels, hidden), strict=True):
            yield Parameter(source.tensor("weight"), (hidden, channels, 3), "vector")
            yield Parameter(source.tensor("bias"), (hidden,), "vector")
        yield Parameter(f"{self.positions}.weight", (self.num_rows, hidden), "vector")
        yield from _block_parameters(self.blocks, self.norm, hidden)


@dataclass(frozen=True, slots=True)
class SoundTower:
    """Convolutions of chunks of a log-mel spectrogram, blocks within windows, and a projection.

    Three convolutions of 3 x 3, with steps of 2, make 13 rows of 100 frames."""

    module: ClassVar[str] = "toolkit.models.sound_tower:SoundTowerModule"
    num_mels: int
    channels: int  # of the convolutions
    hidden: int
    num_heads: int
    out: int  # size of a row for the decoder
    chunk: int  # frames
    window: int  # frames that see each other, a multiple of a chunk
    most_rows: int  # of a chunk that have positions
    activation: str  # of the projection, by its name in config.json
    convolutions: tuple[Source, ...]
    flat: Source  # product of a row's channels and bands
    blocks: Sequence[Block]
    norm: Norm
    projection: tuple[Source, Source]

    @property
    def num_bands(self) -> int:
        """Bands of the spectrogram after the convolutions."""
        return shrunk(self.num_mels)

    def most_samples(self, max_model_len: int) -> int:
        """Return the samples of the longest clip. max_model_len: tokens of a prompt."""
        most = MOST_SECONDS * SAMPLE_RATE
        if self.num_rows(most) <= max_model_len:
            return most
        return max_model_len // self.rows_of_chunk * self.chunk * HOP

    def num_rows(self, num_samples: int) -> int:
        """Return the rows of a clip."""
        return rows_of_clip(num_samples, self.chunk)

    @property
    def rows_of_chunk(self) -> int:
        return shrunk(self.chunk)

    @property
    def rows_of_window(self) -> int:
        return self.window // self.chunk * self.rows_of_chunk

    def parameters(self) -> Iterator[Parameter]:
        """Yield the tensors of a checkpoint."""
        before = 1
        for source in self.convolutions:
            yield Parameter(source.tensor("weight"), (self.channels, before, 3, 3), "vector")
            yield Parameter(source.tensor("bias"), (self.channels,), "vector")
            before = self.channels
        flat = self.channels * self.num_bands
        yield Parameter(self.flat.tensor("weight"), (self.hidden, flat), "linear")
        yield from _block_parameters(self.blocks, self.norm, self.hidden)
        for source, rows in zip(self.projection, (self.hidden, self.out), strict=True):
            yield Parameter(source.tensor("weight"), (rows, self.hidden), "linear")
            yield Parameter(source.tensor("bias"), (rows,), "vector")


LEAST_SAMPLES = 8000  # of a clip for Qwen3-ASR; silence follows shorter ones
MOST_SECONDS = 1200  # that it hears at once
CHUNKS_AT_ONCE = 64  # whose convolutions are in memory


def rows_of_clip(num_samples: int, chunk: int) -> int:
    """Return the rows of a clip. chunk: frames that convolutions see together."""
    chunks, rest = divmod(max(num_samples, LEAST_SAMPLES) // HOP, chunk)
    return chunks * shrunk(chunk) + shrunk(rest)


def shrunk(count: int) -> int:
    """Return what three convolutions of width 3, with steps of 2, leave."""
    for _ in range(3):
        count = (count + 1) // 2
    return count


def _block_parameters(blocks: Sequence[Block], last: Norm, hidden: int) -> Iterator[Parameter]:
    for block in blocks:
        products = [
            *((one, hidden, hidden, one.has_bias) for one in (*block.qkv, block.out)),
            *block.mlp.projections(hidden),
        ]
        for norm in (block.attn_norm, block.mlp_norm):
            yield from _norm_parameters(norm)
        for source, rows, columns, has_bias in products:
            yield Parameter(source.tensor("weight"), (rows, columns), "linear")
            if has_bias:
                yield Parameter(source.tensor("bias"), (rows,), "vector")
    yield from _norm_parameters(last)


def _norm_parameters(norm: Norm) -> Iterator[Parameter]:
    return (Parameter(name, shape, "vector") for name, shape, _ in norm.tensors())
