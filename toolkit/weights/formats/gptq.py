"""GPTQ (arXiv:2210.17323), as AutoGPTQ and GPTQModel write it.

`qweight` int32 [columns · bits / 32, rows], `scales` [groups, rows] and `qzeros` int32 [groups,
rows · bits / 32], in which the first version stores zero points less one. `g_idx` int32 [columns]
has the group of each column: with act-order the columns of a group are not neighbors. Weights of 2
and 3 bits become int4."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
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
from toolkit.weights.formats.reading import Fields, Packings, match
from toolkit.weights.layout import Layout

if TYPE_CHECKING:
    from toolkit.distributed import Shard
    from toolkit.weights.groups import Decoded

BITS = (2, 3, 4, 8)


@dataclass(frozen=True, slots=True)
class GPTQ(Packing):
    bits: int
    group: int  # columns; 0: all
    is_symmetric: bool
    has_order: bool  # act-order
    zero_offset: int  # of stored zero points
    scale_type: str

    @property
    def main(self) -> str:
        return "qweight"

    @property
    def layout(self) -> Layout:
        return integers(
            max(4, self.bits),
            self.group,
            self.scale_type,
            is_symmetric=self.is_symmetric,
            has_order=self.has_order,
        )

    def parts(self, rows: Shard, columns: Shard) -> dict[str, Part]:
        words, values = self.bits // gcd(self.bits, 32), 32 // gcd(self.bits, 32)
        groups = groups_of(columns, self.group, has_order=self.has_order)
        return {
            "qweight": Part("int32", (divided(columns, values, words), rows)),
            "qzeros": Part("int32", (groups, divided(rows, values, words))),
            "scales": Part("float32", (groups, rows)),
            "g_idx": Part("int32", (columns,), is_optional=not self.has_order),
        }

    def decode(self, parts: Parts, rows: Shard, columns: Shard) -> Decoded:

        from toolkit.weights.formats.integers import (
            by_group,
            from_zero_points,
            sorted_columns,
            unpack,
            zero_points,
        )

        values = unpack(parts["qweight"].T, self.bits)
        zeros = zero_points(parts["qzeros"], self.bits, self.zero_offset).T
        if self.has_order and not columns.is_full:
            return by_group(values, parts["scales"].T, zeros, parts["g_idx"])
        order = None
        if "g_idx" in parts and self.group:
            order = sorted_columns(parts["g_idx"], self.group, has_order=self.has_order)
        return from_zero_points(self.bits, values, parts["scales"].T, zeros, order, self.layout)


def read(config: Fields, header: Header) -> Packings:
    """Read a quantization_config of quant_method gptq."""
    version = config.text("checkpoint_format", "format", default="gptq")
    if version not in ("gptq", "gptq_v2"):
        raise ValueError(f"checkpoint_format is {version!r}, and tk reads gptq and gptq_v2")
    config.require("pack_dtype", "int32")
    rules = config.fields("dynamic").items()
    quantizes_head = config.boolean("lm_head")

    def find(name: str) -> Packing | None:
        if name == "lm_head" and not quantizes_head:
            return None
        own = config
        for rule, fields in rules:
            if match(rule.removeprefix("+:").removeprefix("-:"), name):
                if rule.startswith("-:"):
                    return None
                own = fields.over(config)
                break
        return packing_of(own, header, name, 1 if version == "gptq" else 0)

    return Packings("gptq", find, header)


def packing_of(config: Fields, header: Header, name: str, zero_offset: int) -> GPTQ:
    """Return the packing of a projection. Raises ValueError for an unsupported one."""
    group = config.integer("group_size", default=128)
    return GPTQ(
        config.bits(*BITS),
        max(0, group),
        config.boolean("sym", default=True),
        config.boolean("desc_act") and group > 0,
        zero_offset,
        scale_type(header, f"{name}.scales"),
    )
