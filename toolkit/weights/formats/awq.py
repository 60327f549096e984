"""AWQ (arXiv:2306.00978), as AutoAWQ writes it for its gemm kernel.

`qweight` int32 [columns, rows / 8], `scales` [groups, rows] and `qzeros` int32 [groups, rows / 8].
The integers of a word are in the order ORDER."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from toolkit.weights.formats.packing import (
    Header,
    Packing,
    Part,
    Parts,
    divided,
    groups_of,
    integers,
    scale_type,
)
from toolkit.weights.formats.reading import Fields, Packings
from toolkit.weights.layout import Layout

if TYPE_CHECKING:
    import torch

    from toolkit.distributed import Shard
    from toolkit.weights.groups import Groups

PER_WORD = 8
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class AWQ(Packing):
    group: int  # columns; 0: all
    scale_type: str

    @property
    def main(self) -> str:
        return "qweight"

    @property
    def layout(self) -> Layout:
        return integers(4, self.group, self.scale_type, is_symmetric=False)

    def parts(self, rows: Shard, columns: Shard) -> dict[str, Part]:
        groups = groups_of(columns, self.group)
        return {
            "qweight": Part("int32", (columns, divided(rows, PER_WORD))),
            "qzeros": Part("int32", (groups, divided(rows, PER_WORD))),
            "scales": Part("float32", (groups, rows)),
        }

    def decode(self, parts: Parts, rows: Shard, columns: Shard) -> Groups:
        from toolkit.weights.formats.integers import from_zero_points

        values, zeros = (_unpack(parts[name]).T for name in ("qweight", "qzeros"))
        return from_zero_points(4, values, parts["scales"].T, zeros, None, self.layout)


def _unpack(words: torch.Tensor) -> torch.Tensor:
    """Return the integers [n, m] in words [n, m / 8]."""
    from toolkit.weights.formats.integers import unpack

    places = [ORDER.index(place) for place in range(PER_WORD)]
    values = unpack(words, 4)
    return values.view(len(values), -1, PER_WORD)[:, :, places].flatten(1)


def read(config: Fields, header: Header) -> Packings:
    """Read a quantization_config of quant_method awq."""
    version = config.text("version", default="gemm").lower()
    if version != "gemm":
        raise ValueError(f"version is {version!r}, and tk reads gemm")
    config.bits(4)
    group = max(0, config.integer("group_size", "q_group_size", default=128))
    skipped = config.names("modules_to_not_convert")

    def find(name: str) -> Packing | None:
        is_skipped = name == "lm_head" or any(part in name for part in skipped)
        # A list that names a router, `gate`, leaves out no `gate_proj`.
        if is_skipped and f"{name}.qweight" not in header:
            return None
        return AWQ(group, scale_type(header, f"{name}.scales"))

    return Packings("awq", find, header)
