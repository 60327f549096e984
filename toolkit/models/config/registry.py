"""Find an architecture by config.json. Imports no torch.

An architecture is a module of `models.architectures`, named like the config's `model_type`, with
ARCHITECTURES (names in the config's `architectures`), Config and describe(config). An entry point
in `tk.models` names such a module of another package. It adds a `model_type` and replaces none."""

import pkgutil
import re
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any, Protocol, cast

import msgspec

from toolkit import plugins
from toolkit.errors import CheckpointError, PluginError
from toolkit.models import architectures
from toolkit.models.config.model_config import ArchitectureConfig
from toolkit.models.config.sounds import PROJECTOR, TOWER, find_sound
from toolkit.models.config.towers import find_sight
from toolkit.models.config.unread import find_unknown
from toolkit.models.config.wrapped import decoder_of, text_config
from toolkit.models.describe import Decoder, Encoder, External, Head
from toolkit.models.fallback.config import (
    FallbackConfig,
    describe_fallback,
    fallback_config,
    may_fall_back,
)
from toolkit.plugins import Group, Plugin
from toolkit.weights.names import TOWERS

MAX_LAYER_EXPERTS = 2**18
"""Most experts in all layers; the largest models have 30,000."""
_LAYERS = re.compile(r"(\w+_)?(n|num)_(\w+_)?layers?")
_EXPERTS = re.compile(r"(\w+_)?(n|num)_(\w+_)?experts")


_OF_WRONG_VALUES = ArithmeticError, AttributeError, KeyError, TypeError
"""Errors of formulas and lookups with values that no model has."""


class Architecture(Protocol):
    """A module of `models.architectures`, or of a plug-in."""

    ARCHITECTURES: tuple[str, ...]
    """Names in config.json's `architectures`. A decoder's `...Model` has no output head: it only
    pools."""
    Config: type[ArchitectureConfig]

    def describe(self, config: Any) -> Decoder | Encoder:
        """Describe the model. Raises ValueError for an unsupported feature."""


@cache
def built_in() -> tuple[str, ...]:
    """Return the values of `model_type` that tk supports itself, with underscores."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(architectures.__path__)))


def model_types() -> tuple[str, ...]:
    """Return the supported values of `model_type`, with underscores. Plug-ins come last."""
    return (*built_in(), *_plugins())


def load_plugins(*, strict: bool) -> None:
    """Load the plug-ins. A broken one is logged or, if `strict`, raises PluginError."""
    plugins.load_installed(Group.MODELS, built_in(), strict=strict)


def supported() -> list[str]:
    """Return the names of all supported architectures, without those of broken plug-ins."""
    names: list[str] = []
    for kind in model_types():
        with suppress(PluginError):
            names += _module(kind).ARCHITECTURES
    return names


def find_problem(raw: dict[str, Any], model_impl: str = "auto") -> str | None:
    """Return why a config.json's architecture is not supported, or None. See --model-impl.

    Raises PluginError if it is that of a broken plug-in. So do the functions below."""
    problem = _find_problem(raw)
    falls_back = problem is not None if model_impl == "auto" else model_impl == "transformers"
    if not falls_back:
        return problem
    if decoder_of(raw) is not None:
        return "tk computes its text decoder alone, and not through Transformers"
    return None if may_fall_back(raw) else problem or "only decoders run through Transformers"


def _find_problem(raw: dict[str, Any]) -> str | None:
    """Return why there is no description for a config.json, or None."""
    if (decoder := decoder_of(raw)) is not None and decoder in model_types():
        return None
    names = raw.get("architectures") or []
    if not isinstance(names, list):
        return f"its architectures are {names!r}, not a list"
    kind = _kind(raw)
    if not names:
        return f"it names no architecture; its model_type is {raw.get('model_type')!r}"
    if kind not in model_types() or not set(names) & set(_module(kind).ARCHITECTURES):
        listed = " or ".join(map(repr, names))
        return f"unsupported architecture {listed} with model_type {raw.get('model_type')!r}"
    return None


def _of_a_field(error: Exception) -> str:
    return f"a field has a value that cannot be computed with ({error})"


def _find_excess(raw: dict[str, Any]) -> str | None:
    """Return which numbers of layers and experts no memory could describe, or None."""
    layers, experts = (
        {name: n for name, n in raw.items() if kind.fullmatch(name) and isinstance(n, int)}
        for kind in (_LAYERS, _EXPERTS)
    )
    if max(layers.values(), default=1) * max(1, *experts.values(), 1) <= MAX_LAYER_EXPERTS:
        return None
    listed = " and ".join(f"{name} {n}" for name, n in {**layers, **experts}.items())
    return f"it has {listed}: more than any model has"


def parse_config(raw: dict[str, Any], model_impl: str = "auto") -> ArchitectureConfig:
    """Parse the content of a config.json.

    Raises ValueError for a value of the wrong type, a contradiction, an unsupported feature, or an
    unknown field that may change what the model computes."""
    whole, is_wrapped = raw, decoder_of(raw) is not None
    if is_wrapped:
        raw = text_config(raw)
        raw["architectures"] = [_module(_kind(raw)).ARCHITECTURES[0]]
    problem = find_problem(raw, model_impl) or _find_excess(raw)
    if problem is not None:
        raise ValueError(problem)
    if _find_problem(raw) is not None:
        return fallback_config(raw)
    if model_impl == "transformers":
        fallback = fallback_config(raw)
        own = msgspec.structs.fields(_module(_kind(raw)).Config)
        (overflows,) = (one.default for one in own if one.name == "overflows_float16")
        fallback.overflows_float16 = bool(overflows)
        return fallback
    unknown = find_unknown(raw, _module(_kind(raw)).Config)
    if unknown is not None:
        raise ValueError(unknown)
    try:
        config = msgspec.convert(raw, _module(_kind(raw)).Config)
    except msgspec.ValidationError as error:
        raise ValueError(str(error).replace("`$.", "`")) from None
    except _OF_WRONG_VALUES as error:
        raise ValueError(_of_a_field(error)) from error
    config.is_wrapped, config.sight = is_wrapped, find_sight(whole, config)
    config.sound = find_sound(whole, config) if is_wrapped else None
    config.model_type = _kind(raw)
    known = _module(config.model_type).ARCHITECTURES
    config.architectures = [name for name in config.architectures if name in known]
    if not has_head(config):
        config.tie_word_embeddings = True  # the head is unused; tied, it takes no memory
    return config


def describe(config: ArchitectureConfig) -> Decoder | Encoder | External:
    """Describe a model. Raises CheckpointError for an unsupported feature."""
    if isinstance(config, FallbackConfig):
        return describe_fallback(config)
    try:
        description = _module(config.model_type).describe(config)
    except ValueError as error:
        raise CheckpointError(f"config.json cannot be used: {error}.") from None
    except Exception as error:
        if plugin := _plugins().get(config.model_type):
            raise plugin.error(error) from error
        if isinstance(error, _OF_WRONG_VALUES):
            problem = _of_a_field(error)
            raise CheckpointError(f"config.json cannot be used: {problem}.") from error
        raise
    if isinstance(description, Decoder) and config.is_wrapped:
        axes = () if config.sight is None else config.sight.axes
        sound = None if config.sound is None else config.sound.tower
        read = "" if sound is None else f"{TOWER}.{PROJECTOR}."
        unused = *description.unused, *(part for part in TOWERS if part not in read)
        description = replace(description, unused=unused, axes=axes, sound=sound)
    if isinstance(description, Decoder) and not has_head(config):
        unused = (*description.unused, "lm_head.", "embed_out.")
        return replace(description, head=Head(), unused=unused)
    return description


def has_head(config: ArchitectureConfig) -> bool:
    """Return whether the checkpoint has a head: for a decoder, the output head."""
    name = config.architectures[0]
    return name.endswith("HeadModel") or not name.endswith("Model")


def _kind(raw: dict[str, Any]) -> str:
    return re.sub(r"\W", "_", str(raw.get("model_type")))


@cache
def _plugins() -> dict[str, Plugin]:
    """Return the plug-ins by `model_type`, without loading them."""
    found: dict[str, Plugin] = {}
    for plugin in plugins.installed(Group.MODELS):
        if plugin.name not in built_in():
            found.setdefault(plugin.name, plugin)
    return found


def _module(kind: str) -> Architecture:
    """Raises PluginError if it is a plug-in's and broken."""
    if plugin := _plugins().get(kind):
        return cast("Architecture", plugin.load())
    return cast("Architecture", import_module(f"{architectures.__name__}.{kind}"))
