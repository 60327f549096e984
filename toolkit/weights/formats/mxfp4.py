"""MXFP4 checkpoints: experts of gpt-oss, quant_method mxfp4.

Each projection is a part of `…_blocks` [experts, rows, groups, 16], bytes of two numbers of 4 bits,
the even column in the low half, and `…_scales` [experts, rows, groups] (`kernels.mxfp4`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from toolkit.weights.formats.packing import Header, Packing, Part, Parts, divided
from toolkit.weights.formats.reading import Fields, Packings
from toolkit.weights.layout import MXFP4, Layout

if TYPE_CHECKING:
    from toolkit.distributed import Shard
    from toolkit.weights.groups import Groups

_GROUP = 32


@dataclass(frozen=True, slots=True)
class Microscaled(Packing):
    @property
    def layout(self) -> Layout:
        return MXFP4

    @property
    def main(self) -> str:
        return "blocks"

    def parts(self, rows: Shard, columns: Shard) -> dict[str, Part]:
        groups = divided(columns, _GROUP)
        half = _GROUP // 2
        return {
            "blocks": Part("uint8", (rows, groups, type(rows)(half, 0, half))),
            "scales": Part("uint8", (rows, groups)),
        }

    def decode(self, parts: Parts, rows: Shard, columns: Shard) -> Groups:
        """Return integers of 8 bits: twice the numbers are integers."""
        import torch

        from toolkit.kernels import mxfp4
        from toolkit.weights.groups import Groups

        blocks = parts["blocks"]
        numbers = torch.stack((blocks & 15, blocks >> 4), 3).flatten(1)
        values = (2 * mxfp4.decode(numbers) + 128).to(torch.uint8)
        scales = torch.exp2(parts["scales"].float() - 128).bfloat16()
        return Groups(8, values, scales)


def read(config: Fields, header: Header) -> Packings:
    """Read a quantization_config of quant_method mxfp4."""
    skipped = config.names("modules_to_not_convert")

    def find(name: str) -> Packing | None:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")) or name in skipped:
            return None
        return Microscaled() if not header or f"{name}_blocks" in header else None

    return Packings("mxfp4", find, header)
