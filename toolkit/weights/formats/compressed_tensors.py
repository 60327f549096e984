"""compressed-tensors, as LLM Compressor writes it.

A scheme of `config_groups` holds for the modules that its targets name, by class, name or regular
expression. Integers are stored as they are, or packed into `weight_packed` int32 [rows, columns ·
bits / 32], with 2 ** (bits - 1) added. Scales multiply the weight. Scales of activations are not
read, see `fp8`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.weights.formats.fp8 import BLOCK, FP8
from toolkit.weights.formats.packing import (
    UNUSED,
    Header,
    Packing,
    Part,
    Parts,
    divided,
    groups_of,
    integers,
    scale_type,
)
from toolkit.weights.formats.reading import Fields, Packings, matches
from toolkit.weights.layout import Layout

if TYPE_CHECKING:
    from toolkit.distributed import Shard
    from toolkit.weights.groups import Decoded

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


@dataclass(frozen=True, slots=True)
class Integers(Packing):
    bits: int
    group: int  # columns; 0: all
    is_symmetric: bool
    is_packed: bool
    has_order: bool
    scale_type: str
    has_tensor_scale: bool = False  # one scale for all
    has_packed_zeros: bool = True

    @property
    def main(self) -> str:
        return "weight_packed" if self.is_packed else "weight_scale"

    @property
    def layout(self) -> Layout:
        return integers(
            self.bits,
            self.group,
            self.scale_type,
            is_symmetric=self.is_symmetric,
            has_order=self.has_order,
        )

    def parts(self, rows: Shard, columns: Shard) -> dict[str, Part]:
        per_word = 32 // self.bits
        groups = groups_of(columns, self.group, has_order=self.has_order)
        scale = Part("float32") if self.has_tensor_scale else Part("float32", (rows, groups))
        zeros = scale
        if not self.has_tensor_scale:
            zeros = (
                Part("int32", (divided(rows, per_word), groups))
                if self.has_packed_zeros and not self.is_symmetric
                else Part("int8", (rows, groups))
            )
        elif not self.is_symmetric:
            zeros = Part("int8")
        named = {
            "weight_scale": scale,
            "weight_zero_point": UNUSED if self.is_symmetric else zeros,
            "weight_shape": UNUSED,
            "input_scale": UNUSED,
            "input_zero_point": UNUSED,
            "weight_g_idx": Part("int32", (columns,)) if self.has_order else UNUSED,
        }
        if self.is_packed:
            return named | {"weight_packed": Part("int32", (rows, divided(columns, per_word)))}
        return named | {"weight": Part("int8", (rows, columns))}

    def decode(self, parts: Parts, rows: Shard, columns: Shard) -> Decoded:
        import torch

        from toolkit.weights.formats.integers import (
            by_group,
            from_zero_points,
            sorted_columns,
            unpack,
        )

        middle = 2 ** (self.bits - 1)
        if self.is_packed:
            values = unpack(parts["weight_packed"], self.bits)
        else:
            values = (parts["weight"].short() + middle).to(torch.uint8)
        scales, zeros, order = parts["weight_scale"], None, None
        if not self.is_symmetric:
            stored = parts["weight_zero_point"]
            is_packed = stored.dtype == torch.int32
            zeros = unpack(stored.T, self.bits).T[: rows.count] if is_packed else stored + middle
        if self.has_tensor_scale:
            scales = scales.reshape(1, 1).expand(rows.count, 1)
            zeros = None if zeros is None else zeros.reshape(1, 1).expand(rows.count, 1)
        if self.has_order and not columns.is_full:
            zeros = torch.full_like(scales, middle) if zeros is None else zeros
            return by_group(values, scales, zeros, parts["weight_g_idx"])
        if self.has_order:
            order = sorted_columns(parts["weight_g_idx"], self.group, has_order=True)
        return from_zero_points(self.bits, values, scales, zeros, order, self.layout)


def read(config: Fields, header: Header) -> Packings:
    """Read a quantization_config of quant_method compressed-tensors."""
    for name, what in (("sparsity_config", "sparse weights"), ("transform_config", "transforms")):
        given = config.get(name)
        is_on = given.get("format", "") != "dense" if isinstance(given, dict) and given else given
        if is_on:
            raise ValueError(f"it has {name}, and tk does not read {what}")
    config.require("quantization_status", "compressed", "frozen")
    schemes = [_Scheme.read(scheme, config) for _, scheme in config.fields("config_groups").items()]
    skipped = config.names("ignore")

    def find(name: str) -> Packing | None:
        if any(matches(pattern, name) for pattern in skipped):
            return None
        scheme = next((one for one in schemes if one.has_name(name)), None) or next(
            (one for one in schemes if one.has_class), None
        )
        return None if scheme is None else scheme.packing(name, header)

    return Packings("compressed-tensors", find, header)


@dataclass(frozen=True)
class _Scheme:
    """An entry of config_groups."""

    targets: list[str]
    weights: Fields
    format: str

    @classmethod
    def read(cls, scheme: Fields, config: Fields) -> _Scheme:
        kind = scheme.text("format", default=config.text("format"))
        if kind not in FORMATS:
            raise ValueError(f"its format is {kind!r}, and tk reads {', '.join(FORMATS)}")
        weights = scheme.fields("weights")
        number = f"{weights.text('type')}{weights.integer('num_bits')}"
        if number not in ("int4", "int8", "float8"):
            raise ValueError(f"its weights are {number}, and tk reads int4, int8, float8")
        return cls(scheme.names("targets"), weights, kind)

    @property
    def has_class(self) -> bool:
        return "Linear" in self.targets

    def has_name(self, name: str) -> bool:
        return any(matches(target, name) for target in self.targets)

    def packing(self, name: str, header: Header) -> Packing:
        weights, strategy = self.weights, self.weights.text("strategy")
        if weights.text("type") == "float":
            return self._fp8(strategy)
        if strategy not in ("tensor", "channel", "group"):
            raise ValueError(f"{weights.path}.strategy is {strategy!r} for integers")
        zeros = header.get(f"{name}.weight_zero_point")
        group = weights.integer("group_size", default=0) if strategy == "group" else 0
        if group < 0:
            raise ValueError(f"{weights.path}.group_size is {group}")
        return Integers(
            weights.integer("num_bits"),
            group,
            weights.boolean("symmetric", default=True),
            self.format == "pack-quantized",
            weights.get("actorder") in ("group", True),
            scale_type(header, f"{name}.weight_scale", "bfloat16"),
            strategy == "tensor",
            zeros is None or zeros.kind == "I32",
        )

    def _fp8(self, strategy: str) -> Packing:
        if strategy == "block":
            block: Any = self.weights.get("block_structure")
            if block != list(BLOCK):
                raise ValueError(f"block_structure is {block!r}, and tk reads {list(BLOCK)}")
            return FP8("weight_scale", BLOCK)
        if strategy not in ("tensor", "channel"):
            raise ValueError(f"{self.weights.path}.strategy is {strategy!r} for FP8")
        return FP8("weight_scale", has_row_scales=strategy == "channel")
