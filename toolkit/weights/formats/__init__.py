"""Formats of quantized checkpoints. Imports no torch.

Each module reads the `quantization_config` of one quant_method, and decodes what the files have
into a layout of `layout`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from toolkit.weights.formats import (
    auto_round,
    awq,
    bitsandbytes,
    compressed_tensors,
    fp8,
    gptq,
    mxfp4,
)
from toolkit.weights.formats.packing import Header, Packing, Part
from toolkit.weights.formats.reading import Fields, Packings

__all__ = ["QUANTIZATION_FIELDS", "Header", "Packing", "Packings", "Part", "read_packings"]

READERS: dict[str, Callable[[Fields, Header], Packings]] = {
    "gptq": gptq.read,
    "awq": awq.read,
    "auto-round": auto_round.read,
    "compressed-tensors": compressed_tensors.read,
    "fp8": fp8.read,
    "fbgemm_fp8": fp8.read_fbgemm,
    "modelopt": fp8.read_modelopt,
    "bitsandbytes": bitsandbytes.read,
    "mxfp4": mxfp4.read,
}
QUANTIZATION_FIELDS = ("quantization_config", "compression_config")
"""Fields of config.json."""
_SYNONYMS = {"intel/auto-round": "auto-round", "auto_round": "auto-round"}
_INSTEAD = "Use the original model with --quantization, or one in another format"


def read_packings(raw: Mapping[str, Any], header: Header) -> Packings | None:
    """Read the quantization_config of a config.json; None without one.

    Raises ValueError for an unsupported format."""
    given = next((raw[name] for name in QUANTIZATION_FIELDS if raw.get(name)), None)
    if not given:
        return None
    if not isinstance(given, dict):
        raise ValueError("quantization_config is no object")
    config = Fields(given)
    method = config.text("quant_method")
    method = _SYNONYMS.get(method, method)
    if method not in READERS:
        raise ValueError(
            f"its weights are quantized by {method or 'an unnamed method'}, and tk reads "
            f"{', '.join(READERS)}. {_INSTEAD}"
        )
    try:
        return READERS[method](config, header)
    except ValueError as error:
        raise ValueError(f"its weights are quantized by {method}: {error}. {_INSTEAD}") from None
