"""FP8 (e4m3) checkpoints: quant_method fp8, fbgemm_fp8 and modelopt.

`weight` [rows, columns] in FP8 with `weight_scale`, one for all or one for each row, or
`weight_scale_inv`, one for each block. They multiply the weight. Scales of activations
(`input_scale`) are not read: products measure their input, which is more accurate."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from toolkit.weights.formats.packing import UNUSED, Header, Packing, Part, Parts, divided
from toolkit.weights.formats.reading import Fields, Packings
from toolkit.weights.layout import Kind, Layout

if TYPE_CHECKING:
    from toolkit.distributed import Shard
    from toolkit.weights.groups import Blocks

BLOCK = (128, 128)


@dataclass(frozen=True, slots=True)
class FP8(Packing):
    scale: str  # name of the scales' tensor
    block: tuple[int, int] | None = None
    has_row_scales: bool = False  # False without blocks: one scale for all

    @property
    def main(self) -> str:
        return self.scale

    @property
    def layout(self) -> Layout:
        if self.block is None:
            return Layout(Kind.FP8, 8)
        return Layout(Kind.FP8, 8, self.block[1], self.block[0])

    def parts(self, rows: Shard, columns: Shard) -> dict[str, Part]:
        from toolkit.distributed import full_shard

        if self.block is not None:
            scale = Part("float32", (blocks(rows, self.block[0]), blocks(columns, self.block[1])))
        elif self.has_row_scales:
            scale = Part("float32", (rows, full_shard(1)))
        else:
            scale = Part("float32")
        weight = Part("float8_e4m3fn", (rows, columns))
        return {
            "weight": weight, self.scale: scale,
            **dict.fromkeys(("input_scale", "output_scale", "activation_scale",
                             "input_scale_ub", "k_scale", "v_scale"), UNUSED),
        }  # fmt: skip

    def decode(self, parts: Parts, rows: Shard, columns: Shard) -> Blocks:
        from toolkit.weights.groups import Blocks

        scales = parts[self.scale]
        if self.block is not None:
            return Blocks(parts["weight"], scales, self.block)
        if not self.has_row_scales:
            if scales.numel() != 1:
                raise ValueError(f"{self.scale} has {scales.numel()} numbers instead of one")
            scales = scales.reshape(1, 1).expand(rows.count, 1)
        return Blocks(parts["weight"], scales, (1, columns.count))


@dataclass(frozen=True, slots=True)
class StackedFP8(Packing):
    """Experts of Llama 4: one tensor `…_proj` [experts, columns, rows], and `…_proj_scale`.

    Scales are [experts, 1, rows] of gate and up, and [experts, rows, 1] of down."""

    is_down: bool

    @property
    def main(self) -> str:
        return "scale"

    @property
    def layout(self) -> Layout:
        return Layout(Kind.FP8, 8)

    def parts(self, rows: Shard, columns: Shard) -> dict[str, Part]:
        one = type(rows)(1, 0, 1)
        scale = Part("float32", (rows, one) if self.is_down else (one, rows))
        return {"weight": Part("float8_e4m3fn", (columns, rows)), "scale": scale}

    def decode(self, parts: Parts, rows: Shard, columns: Shard) -> Blocks:
        from toolkit.weights.groups import Blocks

        scales = parts["scale"].reshape(rows.count, 1)
        return Blocks(parts["weight"].T, scales, (1, columns.count))


def blocks(shard: Shard, size: int) -> Shard:
    """Return the blocks of a shard. Only the last one of a dimension may be smaller."""
    end = shard.begin + shard.count
    if end == shard.total and shard.total % size:
        begin = divided(type(shard)(shard.begin, shard.begin, 0), size).begin
        return type(shard)(-(-shard.total // size), begin, -(-end // size) - begin)
    if shard.total % size:
        total = -(-shard.total // size)
        part = divided(type(shard)(end, shard.begin, shard.count), size)
        return type(shard)(total, part.begin, part.count)
    return divided(shard, size)


def read(config: Fields, header: Header) -> Packings:
    """Read a quantization_config of quant_method fp8."""
    config.require("fmt", "e4m3", "float8_e4m3fn")
    config.require("activation_scheme", "dynamic", "static")
    skipped = config.names("modules_to_not_convert", "ignored_layers")
    size = config.get("weight_block_size")
    if size is not None and size != list(BLOCK):
        raise ValueError(f"weight_block_size is {size!r}, and tk reads {list(BLOCK)}")

    def find(name: str) -> Packing | None:
        if name == "lm_head" or _is_skipped(name, skipped):
            return None
        if size is not None:
            return FP8("weight_scale_inv", BLOCK)
        return by_header(name, header)

    return Packings("fp8", find, header)


def read_fbgemm(config: Fields, header: Header) -> Packings:
    """Read a quantization_config of quant_method fbgemm_fp8."""
    skipped = config.names("modules_to_not_convert")

    def find(name: str) -> Packing | None:
        if name == "lm_head" or _is_skipped(name, skipped):
            return None
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            is_known = not header or f"{name}_scale" in header
            return StackedFP8(name.endswith("down_proj")) if is_known else None
        return FP8("weight_scale", has_row_scales=True)

    return Packings("fbgemm_fp8", find, header)


def read_modelopt(config: Fields, header: Header) -> Packings:
    """Read a quantization_config of quant_method modelopt."""
    inner = config.fields("quantization").over(config)
    algorithm = inner.text("quant_algo")
    if algorithm != "FP8":
        raise ValueError(f"quant_algo is {algorithm!r}, and tk reads FP8")
    skipped = inner.names("exclude_modules", "ignore")

    def find(name: str) -> Packing | None:
        if any(fnmatchcase(name, pattern) or name.startswith(f"{pattern}.") for pattern in skipped):
            return None
        return by_header(name, header)

    return Packings("modelopt", find, header)


def by_header(name: str, header: Header) -> FP8:
    """Return the packing of a weight with a scale for each row if the file has as many, else one.

    Older files call one scale weight_scale_inv, too."""
    tensors = [end for end in ("weight_scale", "weight_scale_inv") if f"{name}.{end}" in header]
    scale = tensors[0] if tensors else "weight_scale"
    stored = header.get(f"{name}.{scale}")
    return FP8(scale, has_row_scales=stored is not None and len(stored.shape) == 2
               and stored.shape[0] > 1)  # fmt: skip


def _is_skipped(name: str, skipped: list[str]) -> bool:
    """Return True for a module in a list: the end of its name, or whole parts of it."""
    return any(f".{part.strip('.')}." in f".{name}." for part in skipped)
