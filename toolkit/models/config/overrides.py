"""Read config.json, with the fields that a user overrides. Imports no torch."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from toolkit.errors import CheckpointError
from toolkit.files import parse_json
from toolkit.gguf.folder import is_gguf, read_file
from toolkit.models.config.wrapped import WHOLE, decoder_of, unnest
from toolkit.weights.formats import QUANTIZATION_FIELDS

QUANTIZATION_FILES = {
    "hf_quant_config.json": "modelopt",  # NVIDIA's Model Optimizer
    "quantize_config.json": "gptq",  # AutoGPTQ
    "quant_config.json": "awq",  # AutoAWQ
}
"""Files that have the quantization, in checkpoints whose config.json does not, and the method."""
NO_OVERRIDES: Mapping[str, Any] = {}
_ROPE = ("rope_scaling", "rope_parameters")  # old and new name
_OF_WHOLE = ("architectures", "model_type", "text_config", "vision_config", *WHOLE)
_OF_ANY_TYPE = ("rope_theta", "partial_rotary_factor")


def read_config(folder: Path, overrides: Mapping[str, Any] = NO_OVERRIDES) -> dict[str, Any]:
    """Return a folder's config.json with overrides. Raises CheckpointError if unreadable."""
    path = folder if is_gguf(folder) else folder / "config.json"
    try:
        text = read_file(folder, "config.json")
        if text is None:
            raise OSError("there is no such file")
        raw = parse_json(text)
        if not isinstance(raw, dict):
            raise ValueError("it is not a JSON object")
        add_quantization(raw, lambda name: read_file(folder, name))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    return override(unnest(raw), overrides)


def add_quantization(raw: dict[str, Any], read: Callable[[str], str | None]) -> None:
    """Add one of QUANTIZATION_FILES to a config.json that says nothing of quantization.

    `read` returns the text of a file; None or an empty one if there is none.
    Raises ValueError if it is no JSON object."""
    if any(raw.get(name) for name in QUANTIZATION_FIELDS):
        return
    for name, method in QUANTIZATION_FILES.items():
        if text := read(name):
            given = parse_json(text)
            if not isinstance(given, dict):
                raise ValueError(f"{name} is not a JSON object")
            raw["quantization_config"] = {"quant_method": method, **given}
            return


def override(raw: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with some fields replaced; null removes one.

    Parameters of the rotation are merged: those for the same type of scaling are kept, and the base
    and the rotated part for another. If layer types have their own, those of full attention are
    changed. Fields of a decoder next to a tower are found in `text_config`."""
    nested = raw.get("text_config")
    if decoder_of(raw) is not None and isinstance(nested, dict) and nested:
        of_text = {name: value for name, value in overrides.items() if name not in _OF_WHOLE}
        whole = {name: value for name, value in overrides.items() if name in _OF_WHOLE}
        raw = {**raw, "text_config": _override(nested, of_text)}
        return _override(raw, whole)
    return _override(raw, overrides)


def _override(raw: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    removed = {name for name, value in overrides.items() if value is None}
    merged = {name: value for name, value in {**raw, **overrides}.items() if name not in removed}
    for name in _ROPE:
        if name in overrides:
            for other in _ROPE:
                merged.pop(other, None)
            merged["rope_parameters"] = _merged_rope(raw, overrides[name])
    return merged


def _merged_rope(raw: dict[str, Any], wanted: Any) -> Any:
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if wanted is None:
        wanted = {"rope_type": "default"}
    if not isinstance(wanted, dict) or not isinstance(given, dict) or _is_nested(wanted):
        return wanted  # of all layer types, or refused by the types of the config's fields
    if _is_nested(given):
        full = given.get("full_attention") or {}
        return given | {"full_attention": _merged_scaling(full, wanted)}
    return _merged_scaling(given, wanted)


def _merged_scaling(given: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    kind = _kind(wanted) or _kind(given)
    kept = given if kind == _kind(given) else {k: given[k] for k in _OF_ANY_TYPE if k in given}
    merged = kept | wanted
    return {**merged, "rope_type": kind} if kind else merged


def _kind(parameters: dict[str, Any]) -> Any:
    return parameters.get("rope_type") or parameters.get("type")


def _is_nested(parameters: dict[str, Any]) -> bool:
    return any(isinstance(value, dict) for value in parameters.values())
