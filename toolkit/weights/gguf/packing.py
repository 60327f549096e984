"""Packings of GGUF's quantized types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from toolkit.gguf.config import HeadsInTurn
from toolkit.gguf.file import TYPES
from toolkit.weights.formats import Header, Packing, Packings, Part
from toolkit.weights.formats.packing import Parts, groups_of
from toolkit.weights.layout import MXFP4, Kind, Layout

if TYPE_CHECKING:
    from toolkit.distributed import Shard
    from toolkit.weights.groups import Decoded


def _layout(bits: int, group: int, scales: str, offsets: str = "") -> Layout:
    return Layout(Kind.INTEGERS, bits, group, scale_type=scales, offset_type=offsets)


LAYOUTS = {
    "Q4_0": _layout(4, 32, "float16"),
    "Q4_1": _layout(4, 32, "float16", "float16"),
    "Q5_0": _layout(8, 32, "float16"),
    "Q5_1": _layout(8, 32, "float16", "float16"),
    "Q8_0": _layout(8, 32, "float16"),
    "Q2_K": _layout(4, 16, "float32", "float32"),
    "Q3_K": _layout(4, 16, "float32"),
    "Q4_K": _layout(4, 32, "float32", "float32"),
    "Q5_K": _layout(8, 32, "float32", "float32"),
    "Q6_K": _layout(8, 16, "float32"),
    "IQ4_NL": _layout(8, 32, "float16"),
    "IQ4_XS": _layout(8, 32, "float32"),
    "MXFP4": MXFP4,
}
"""Layouts that hold a type's weights exactly."""


@dataclass(frozen=True, slots=True)
class GGUFPacking(Packing):
    type: str  # a key of LAYOUTS
    heads: HeadsInTurn | None = None

    @property
    def main(self) -> str:
        return "weight"

    @property
    def _order(self) -> list[int]:
        """The file's column for each of the weight. Empty: the same."""
        return self.heads.order if self.heads is not None and self.heads.dim == 1 else []

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.type]

    def parts(self, rows: Shard, columns: Shard) -> dict[str, Part]:
        groups_of(columns, self.layout.group)  # raises if one is cut
        stored = type(columns)(columns.total, 0, columns.total) if self._order else columns
        return {"weight": Part("uint8", (rows, stored))}

    def decode(self, parts: Parts, rows: Shard, columns: Shard) -> Decoded:
        from toolkit.weights.gguf.decode import decode
        from toolkit.weights.groups import Groups

        if order := self._order:
            decoded = decode(self.type, parts["weight"], columns.total)
            assert isinstance(decoded, Groups), "types in LAYOUTS are quantized"
            return decoded.reordered(order[columns.begin : columns.begin + columns.count])
        # Blocks that the part cuts were read.
        block = next(kind.block for kind in TYPES.values() if kind.name == self.type)
        begin = columns.begin // block * block
        end = -(-(columns.begin + columns.count) // block) * block
        decoded = decode(self.type, parts["weight"], end - begin)
        assert isinstance(decoded, Groups), "types in LAYOUTS are quantized"
        return decoded.columns(columns.begin - begin, columns.count)


def packings(header: Header) -> Packings | None:
    """Return the packings of a file's tensors; None if all types are plain."""
    if not any(tensor.kind in LAYOUTS for tensor in header.values()):
        return None

    def find(name: str) -> Packing | None:
        tensor = header.get(f"{name}.weight")
        if tensor is None or tensor.kind not in LAYOUTS:
            return None
        return GGUFPacking(tensor.kind, getattr(tensor, "heads", None))  # None in an inventory

    return Packings("GGUF", find, header)
