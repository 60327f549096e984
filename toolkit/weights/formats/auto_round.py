"""AutoRound (arXiv:2309.05516): the packings of GPTQ and AWQ, with options for single modules."""

from __future__ import annotations

from toolkit.weights.formats import awq, gptq
from toolkit.weights.formats.packing import Header, Packing, scale_type
from toolkit.weights.formats.reading import Fields, Packings, match

FORMATS = ("auto_round:auto_gptq", "auto_round:auto_awq", "auto_round:gptqmodel")
MIN_PLAIN_BITS = 16


def read(config: Fields, header: Header) -> Packings:
    """Read a quantization_config of quant_method auto-round."""
    packing = config.text("packing_format", default=FORMATS[0])
    if packing not in FORMATS:
        raise ValueError(f"packing_format is {packing!r}, and tk reads {', '.join(FORMATS)}")
    config.require("data_type", "int")
    own = dict(config.fields("extra_config").items())
    blocks = config.get("block_name_to_quantize", "to_quant_block_names")

    def find(name: str) -> Packing | None:
        fields = own.get(name) or next(
            (one for rule, one in own.items() if match(f"{rule}$", name)), None
        )
        if fields is None and not _is_in_blocks(name, blocks):
            return None
        merged = config if fields is None else fields.over(config)
        if merged.integer("bits") >= MIN_PLAIN_BITS:
            return None
        if packing == FORMATS[1]:
            merged.bits(4)
            group = max(0, merged.integer("group_size", default=128))
            return awq.AWQ(group, scale_type(header, f"{name}.scales"))
        return gptq.packing_of(merged, header, name, 0 if packing == FORMATS[2] else 1)

    return Packings("auto-round", find, header)


def _is_in_blocks(name: str, blocks: object) -> bool:
    """Return True if a module is in a block to quantize: by default all but the head."""
    if isinstance(blocks, str):
        blocks = blocks.split(",")
    if not isinstance(blocks, list) or not blocks:
        return name != "lm_head"
    names = [one for block in blocks for one in (block if isinstance(block, list) else [block])]
    return any(name.startswith(f"{one}.") for one in names)
