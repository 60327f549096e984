"""Settings of pictures: limits of requests, and the image processor of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from toolkit.errors import CheckpointError, ConfigError, did_you_mean
from toolkit.files import read_json

if TYPE_CHECKING:
    from toolkit.pictures.families import Family

FILES = {"preprocessor_config.json": "", "processor_config.json": "image_processor"}
"""Files with an image processor's settings, and the key that has them."""
OVERRIDES = "mm_processor_kwargs"
_SUFFIXES = ("Fast", "Pil")


class PictureLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the pictures in requests."""

    max_bytes: int = 32 * 2**20  # an encoded file
    max_pixels: int = 64_000_000  # width x height from the header, before decoding
    timeout: float = 20.0  # seconds for a worker to decode and resize one picture
    fetch_timeout: float = 10.0  # seconds in all for a download, slow hosts included
    bytes_in_flight: int = 512 * 2**20  # encoded bytes held for all requests; beyond: 503
    allowed_domains: tuple[str, ...] = ()  # of http(s) URLs; empty: none is fetched
    local_folder: str = ""  # file: URLs must be below it; empty: none is read


class ProcessorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Transformers' image processor and its settings, as in preprocessor_config.json."""

    name: str  # e.g. "Qwen2VLImageProcessor": its Pillow-backed class is used, always
    fields: dict[str, Any]  # of preprocessor_config.json, with the user's mm_processor_kwargs
    family: str  # module of toolkit/pictures/families with `pack`
    patch_size: int = 14  # pixels of a side of the tower's patches
    merge: int = 2  # patches of a side of a token's square

    @property
    def mean(self) -> tuple[float, ...] | None:
        """Mean of each channel, to subtract from rescaled values. None if floats travel."""
        return self._channels("image_mean", 0.0)

    @property
    def std(self) -> tuple[float, ...] | None:
        """Divisor of each channel, after the mean. None if floats travel."""
        return self._channels("image_std", 1.0)

    @property
    def rescale_factor(self) -> float | None:
        """Factor of the values 0 to 255. None if floats travel: they are rescaled already."""
        if self.sends_floats:
            return None
        return float(self.fields["rescale_factor"]) if self.fields["do_rescale"] else 1.0

    @property
    def sends_floats(self) -> bool:
        """True if the processor normalizes, because something follows that."""
        from toolkit.pictures.families import find_family

        return find_family(self.family).pads(self.fields)

    def _channels(self, name: str, neutral: float) -> tuple[float, ...] | None:
        if self.sends_floats:
            return None
        value = self.fields[name] if self.fields["do_normalize"] else neutral
        return tuple(map(float, value if isinstance(value, list | tuple) else [value] * 3))


def read_processor(
    folder: Path, family: str, overrides: Mapping[str, Any], *, patch_size: int, merge: int
) -> ProcessorSettings:
    """Read the image processor of a checkpoint; `overrides` are the user's mm_processor_kwargs.

    patch_size: pixels of a side of the tower's patches; merge: patches of a side of a token. Raises
    CheckpointError for a missing or wrong file, ConfigError for wrong overrides."""
    from toolkit.pictures.families import find_family

    rules = find_family(family)
    file, found = _find_fields(folder)
    name = _class_name(found, rules, folder / file)
    if unknown := sorted(overrides.keys() - rules.OPTIONS):
        raise ConfigError(
            f"{OVERRIDES} has {', '.join(map(repr, unknown))}, which {name} does not have."
            + did_you_mean(unknown[0], rules.OPTIONS)
        )
    fields = _defaults(rules, name)
    try:
        _update(fields, rules.modernize({key: found[key] for key in rules.OPTIONS & found.keys()}))
        _update(fields, rules.modernize(dict(overrides)))
    except ValueError as error:
        raise CheckpointError(f"{folder / file} (with {OVERRIDES}): {error}.") from None
    if problem := _problem(fields):
        raise CheckpointError(f"{folder / file} (with {OVERRIDES}): {problem}.")
    return ProcessorSettings(
        name=name,
        fields=fields | rules.fit(patch_size, merge),
        family=family,
        patch_size=patch_size,
        merge=merge,
    )


def _defaults(rules: Family, name: str) -> dict[str, Any]:
    general = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
    return general | rules.DEFAULTS[name]


def _update(fields: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Change fields. Of an object, keys that are not given stay, unless others replace them."""
    for name, value in changes.items():
        old = fields.get(name)
        is_part = isinstance(old, dict) and isinstance(value, dict) and value.keys() <= old.keys()
        fields[name] = old | value if is_part else value


def _find_fields(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return (file name, settings) of the first file that has some."""
    for file, key in FILES.items():
        path = folder / file
        try:
            found = read_json(path)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}.") from None
        if key and isinstance(found, dict):
            found = found.get(key)
        if isinstance(found, dict):
            return file, found
        if not key:
            raise CheckpointError(f"{path} must be a JSON object.")
    raise CheckpointError(
        f"{folder} has no image processor: neither preprocessor_config.json nor "
        "'image_processor' in processor_config.json."
    )


def _class_name(found: Mapping[str, Any], rules: Family, path: Path) -> str:
    """Return the class name without suffixes."""
    given = found.get("image_processor_type") or found.get("feature_extractor_type")
    if given is None and len(rules.PROCESSORS) == 1:
        return next(iter(rules.PROCESSORS))
    name = str(given)
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    name = name.replace("FeatureExtractor", "ImageProcessor")
    if name not in rules.PROCESSORS:
        raise CheckpointError(
            f"{path} names the image processor {given!r}. This model's pictures are supported "
            f"with {' or '.join(sorted(rules.PROCESSORS))}."
        )
    return name


def _problem(fields: Mapping[str, Any]) -> str:
    """Return the problem of the fields that the device computes with, or an empty string."""
    for name in ("image_mean", "image_std"):
        value = fields[name]
        values = value if isinstance(value, list | tuple) else [value] * 3
        if len(values) != 3 or not all(map(_is_number, values)):
            return f"{name} must be a number or three of them, not {value!r}"
        if name == "image_std" and 0 in values:
            return "image_std must not be 0"
    if not _is_number(fields["rescale_factor"]):
        return f"rescale_factor must be a number, not {fields['rescale_factor']!r}"
    return ""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
