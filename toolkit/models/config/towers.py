"""Find the tower of a model that sees, by config.json. Imports no torch.

A tower is a module of `models.towers`, named like the `model_type` of config.json, with TOWERS (the
`model_type` of `vision_config`; "" if it may have none), Config (of `vision_config`), Seeing (of
config.json's other fields), describe(config, seeing), FAMILY (the module of `pictures.families`
that prepares its pictures), SECTIONS (the default lengths of a rotation of the decoder's heads by
three axes) and INTERLEAVED (their pairs take turns)."""

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import msgspec

from toolkit.models import towers
from toolkit.models.config.model_config import ArchitectureConfig
from toolkit.models.config.unread import find_unknown
from toolkit.models.towers.parts import Tower


@dataclass(frozen=True, slots=True)
class Sight:
    """A model's tower, and how its decoder reads pictures."""

    tower: Tower
    axes: tuple[int, ...]
    """For each pair of a head that is rotated: by a token's time (0), row (1) or column (2). Empty:
    by its position."""

    token_id: int  # stands for a row of a picture
    family: str  # module of `pictures.families`
    both_ways: bool = False  # a picture's tokens see each other
    marks: tuple[int, int] | None = None  # tokens around a picture's: see `SeeingConfig.marks`


@cache
def model_types() -> tuple[str, ...]:
    """Return the values of `model_type` whose towers tk runs."""
    found = (module.name for module in pkgutil.iter_modules(towers.__path__))
    return tuple(sorted(name for name in found if name not in ("fields", "parts")))


def find_sight(raw: Mapping[str, Any], decoder: ArchitectureConfig) -> Sight | None:
    """Return the tower of a config.json; None if tk runs none. decoder: the parsed text_config.

    Raises ValueError for a value of the wrong type, or an unsupported feature."""
    kind, vision = raw.get("model_type"), raw.get("vision_config")
    if kind not in model_types() or not isinstance(vision, dict):
        return None
    module = import_module(f"{towers.__name__}.{kind}")
    if module.TOWERS and vision.get("model_type", "") not in module.TOWERS:
        return None
    if (unknown := find_unknown(vision, module.Config)) is not None:
        raise ValueError(f"vision_config: {unknown}")
    try:
        config = msgspec.convert(vision, module.Config)
    except msgspec.ValidationError as error:
        raise ValueError(f"vision_config: {error}".replace("`$.", "`")) from None
    names = set(module.Seeing.__struct_fields__) - {"decoder"}
    try:
        seeing = msgspec.convert({name: raw[name] for name in names & raw.keys()}, module.Seeing)
    except msgspec.ValidationError as error:
        raise ValueError(str(error).replace("`$.", "`")) from None
    if seeing.image_token_id is None:
        raise ValueError("it has no image_token_id")
    seeing.decoder = decoder
    return Sight(
        module.describe(config, seeing),
        _axes(raw, module.SECTIONS, is_interleaved=module.INTERLEAVED),
        seeing.image_token_id,
        module.FAMILY,
        both_ways=seeing.both_ways,
        marks=seeing.marks,
    )


def _axes(
    raw: Mapping[str, Any], default: tuple[int, ...], *, is_interleaved: bool
) -> tuple[int, ...]:
    """Return the axis of each pair, of sections one after the other or in turns.

    Qwen2-VL (arXiv:2409.12191, section 2.1.2), and Qwen3-VL's interleaved order."""
    text = raw.get("text_config")
    own = text if isinstance(text, dict) and text else raw
    rope = own.get("rope_parameters") or own.get("rope_scaling") or {}
    sections = rope.get("mrope_section", default)
    if not isinstance(sections, list | tuple) or not all(isinstance(n, int) for n in sections):
        raise ValueError(f"mrope_section is {sections!r}, not a list of numbers")
    if not sections:
        return ()
    if len(sections) != 3:
        raise ValueError(f"mrope_section is {list(sections)}: tk supports three sections")
    if not is_interleaved:
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    pairs = range(sum(sections))
    return tuple(n % 3 if n < 3 * sections[n % 3] else 0 for n in pairs)
