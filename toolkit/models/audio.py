"""Description of an encoder of clips (Radford et al., 2022, arXiv:2212.04356). Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from toolkit.models.describe import Norm, Parameter
from toolkit.models.towers.parts import Block
from toolkit.weights.source import Source

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
        for block in self.blocks:
            norms = block.attn_norm, block.mlp_norm
            products = [
                *((one, hidden, hidden, one.has_bias) for one in (*block.qkv, block.out)),
                *block.mlp.projections(hidden),
            ]
            for norm in norms:
                for name, shape, _ in norm.tensors():
                    yield Parameter(name, shape, "vector")
            for source, rows, columns, has_bias in products:
                yield Parameter(source.tensor("weight"), (rows, columns), "linear")
                if has_bias:
                    yield Parameter(source.tensor("bias"), (rows,), "vector")
        for name, shape, _ in self.norm.tensors():
            yield Parameter(name, shape, "vector")
