"""The tensors of CTranslate2's Whisper, under the names of the original checkpoint.

Integers are decoded while they are loaded: each row was multiplied with its scale and rounded
(https://opennmt.net/CTranslate2/quantization.html)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from toolkit.ctranslate2.file import Variable
from toolkit.ctranslate2.whisper import NamedTensor, named_tensors, read_whisper
from toolkit.distributed import Shard
from toolkit.weights.loading.safetensors import DTYPES, StoredTensor
from toolkit.weights.slots import FLOATS, Slot


@dataclass(frozen=True, slots=True)
class CTranslate2Stored(StoredTensor):
    """A tensor in a `model.bin`."""

    scales: torch.Tensor | None = field(default=None, compare=False)
    """A number for each row, in fp32; None: the values are plain."""

    def part(self, region: Sequence[Shard]) -> StoredTensor:
        part = StoredTensor.part(self, region)
        if self.scales is None or not region:
            return part
        assert isinstance(part, CTranslate2Stored)
        rows = slice(region[0].begin, region[0].begin + region[0].count)
        return replace(part, scales=self.scales[rows])

    def slot_for(self, slot: Slot) -> Slot:
        if self.scales is None:
            return slot
        return ScaledSlot(slot.target, inner=slot, scales=self.scales)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledSlot(Slot):
    """Destination of integers, which are divided by the scales of their rows."""

    inner: Slot
    scales: torch.Tensor

    @property
    def needs_all_rows(self) -> bool:
        return self.inner.needs_all_rows

    def accepts(self, dtype: torch.dtype) -> bool:
        return self.inner.accepts(torch.float32)

    @property
    def wanted(self) -> str:
        return FLOATS

    def announce(self) -> None:
        self.inner.announce()

    def rows(self, first: int, count: int) -> Slot:
        inner = self.inner.rows(first, count)
        return replace(
            self, target=inner.target, inner=inner, scales=self.scales[first : first + count]
        )

    def fill(self, tensor: torch.Tensor) -> None:
        values = tensor.to(self.target.device).float()
        scales = self.scales.to(values.device).view(-1, *[1] * (values.dim() - 1))
        self.inner.fill(values / scales)


def read_header(folder: Path) -> list[StoredTensor]:
    """Return the tensors of a folder. Raises CheckpointError if its `model.bin` is wrong."""
    model = read_whisper(folder)
    return [_stored(model.file, named) for named in named_tensors(model)]


def _stored(file: Path, named: NamedTensor) -> StoredTensor:
    scales = None
    if named.scale is not None:
        rows = slice(named.first_row, named.first_row + named.shape[0])
        scales = _read_scales(file, named.scale)
        scales = scales[rows] if named.scale.shape else scales.expand(named.shape[0])
    return CTranslate2Stored(
        file, named.name, named.kind, named.shape, named.start, named.num_bytes, scales=scales
    )


def _read_scales(file: Path, scale: Variable) -> torch.Tensor:
    with file.open("rb") as stream:
        stream.seek(scale.start)
        raw = bytearray(stream.read(scale.num_bytes))
    return torch.frombuffer(raw, dtype=DTYPES[scale.kind]).float()
