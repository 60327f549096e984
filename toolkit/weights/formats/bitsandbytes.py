"""bitsandbytes (arXiv:2110.02861, arXiv:2305.14314), as Transformers saves it.

4 bits: `weight` uint8 [rows · columns / 2, 1] has indices into the 16 values of `weight.quant_map`,
the first of a pair in the high half. `weight.absmax` has a scale for each block of 64 weights, in
fp32 or, with double quantization, as uint8 indices into `weight.nested_quant_map` with a scale for
each 256 (`weight.nested_absmax`) and an offset in the JSON of `weight.quant_state.…`.
8 bits: `weight` int8 [rows, columns] with `SCB` [rows], the maximum of each row, which is 127."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from toolkit.weights.formats.packing import UNUSED, Header, Packing, Part, Parts
from toolkit.weights.formats.reading import Fields, Packings
from toolkit.weights.layout import DENSE, Kind, Layout

if TYPE_CHECKING:
    import torch

    from toolkit.distributed import Shard
    from toolkit.weights.groups import Groups

KINDS = ("nf4", "fp4")


@dataclass(frozen=True, slots=True)
class FourBits(Packing):
    kind: str  # of KINDS
    is_nested: bool

    @property
    def main(self) -> str:
        return f"weight.quant_state.bitsandbytes__{self.kind}"

    @property
    def layout(self) -> Layout:
        return DENSE  # its values are no multiples of one scale

    def parts(self, rows: Shard, columns: Shard) -> dict[str, Part]:
        nested = ("weight.nested_absmax", "weight.nested_quant_map") if self.is_nested else ()
        return {
            "weight": Part("uint8"),
            "weight.absmax": Part("uint8" if self.is_nested else "float32"),
            "weight.quant_map": Part("float32"),
            self.main: Part("uint8"),
            **{name: Part("float32") for name in nested},
        }

    def decode(self, parts: Parts, rows: Shard, columns: Shard) -> torch.Tensor:
        import torch

        try:
            state = json.loads(bytes(parts[self.main].tolist()))
            block, shape = int(state["blocksize"]), tuple(map(int, state["shape"]))
            nested, offset = int(state.get("nested_blocksize", 1)), state.get("nested_offset", 0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.main} cannot be read: {error!r}") from None
        packed, scales = parts["weight"].flatten(), parts["weight.absmax"].flatten()
        size = shape[0] * shape[1] if len(shape) == 2 else 0
        if shape != (rows.total, columns.total):
            raise ValueError(f"its shape is {list(shape)}")
        if not size or 2 * len(packed) != size or len(scales) != -(-size // block):
            raise ValueError(f"its shape {list(shape)} and block size {block} do not agree")
        if self.is_nested:
            values = parts["weight.nested_quant_map"].flatten()[scales.long()]
            outer = parts["weight.nested_absmax"].flatten().repeat_interleave(nested)
            scales = values * outer[: len(values)] + float(offset)
        indices = torch.stack((packed >> 4, packed & 15), dim=1).flatten().long()
        table = parts["weight.quant_map"].flatten()
        weight = table[indices]
        whole = (weight * scales.repeat_interleave(block)[:size]).view(shape)
        return whole[rows.entries, columns.entries]


@dataclass(frozen=True, slots=True)
class EightBits(Packing):
    @property
    def main(self) -> str:
        return "SCB"

    @property
    def layout(self) -> Layout:
        return Layout(Kind.INTEGERS, 8)

    def parts(self, rows: Shard, columns: Shard) -> dict[str, Part]:
        return {
            "weight": Part("int8", (rows, columns)),
            "SCB": Part("float32", (rows,)),
            "weight_format": UNUSED,
        }

    def decode(self, parts: Parts, rows: Shard, columns: Shard) -> Groups:
        import torch

        from toolkit.weights.groups import Groups

        values = (parts["weight"].short() + 128).to(torch.uint8)
        return Groups(8, values, parts["SCB"][:, None] / 127)


def read(config: Fields, header: Header) -> Packings:
    """Read a quantization_config of quant_method bitsandbytes."""
    skipped = config.names("llm_int8_skip_modules", default=["lm_head"])
    kind = config.text("bnb_4bit_quant_type", default="fp4")
    if kind not in KINDS:
        raise ValueError(f"bnb_4bit_quant_type is {kind!r}, and tk reads {', '.join(KINDS)}")
    config.require("bnb_4bit_quant_storage", "uint8")
    is_4bit, is_nested = (
        config.boolean("load_in_4bit", "_load_in_4bit"),
        config.boolean("bnb_4bit_use_double_quant"),
    )

    def find(name: str) -> Packing | None:
        if any(part == name or f".{part}." in f".{name}." for part in skipped):
            return None
        return FourBits(kind, is_nested) if is_4bit else EightBits()

    return Packings("bitsandbytes", find, header)
