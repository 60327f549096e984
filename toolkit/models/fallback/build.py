"""Build Transformers' model of a config.json: its class, its config, and an empty instance."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from toolkit.errors import CheckpointError
from toolkit.models.fallback.config import FallbackConfig

logger = logging.getLogger(__name__)
EXPERTS = "grouped_mm"
"""Implementation of experts. The default loops over those that are used, which the host must
know."""


def find_class(config: FallbackConfig) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """Return the model's class, and its config.

    Raises CheckpointError if Transformers has no such decoder, or needs code from the folder."""
    try:
        cls, parsed = _remote(config) if _is_remote(config) else _known(config)
    except CheckpointError:
        raise
    except Exception as error:  # Transformers' checks of config.json raise many types
        text = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{config.path} cannot be used: Transformers' {config.model_type} says: {text}"
        ) from None
    if getattr(parsed, "is_encoder_decoder", False):
        raise _refusal(config, "it has an encoder and a decoder")
    if not getattr(cls, "_supports_attention_backend", False):
        raise _refusal(config, "its attention in Transformers has no interface that tk can use")
    if getattr(cls, "_is_stateful", False):
        raise _refusal(config, "it has a recurrent state, and tk caches keys and values only")
    return cls, parsed


def _is_remote(config: FallbackConfig) -> bool:
    """True if the checkpoint brings the code of its model."""
    return "AutoModelForCausalLM" in (config.raw.get("auto_map") or {}) and not _is_known(config)


def _is_known(config: FallbackConfig) -> bool:
    return config.model_type in transformers.CONFIG_MAPPING


def _known(config: FallbackConfig) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    if not _is_known(config):
        raise _refusal(
            config,
            f"Transformers {transformers.__version__} has no model_type {config.model_type!r}",
        )
    parsed = transformers.CONFIG_MAPPING[config.model_type].from_dict(_with_floats(config.raw))
    known = transformers.AutoModelForCausalLM._model_mapping.get(type(parsed), None)
    classes = known if isinstance(known, tuple) else (known,)
    for name in config.architectures:
        for cls in classes:
            if cls is not None and cls.__name__ == name:
                return cls, parsed
    raise _refusal(config, "Transformers does not list it among its causal language models")


def _with_floats(value: Any) -> Any:
    """Decode Transformers' JSON of infinities: {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {name: _with_floats(one) for name, one in value.items()}
    return [_with_floats(one) for one in value] if isinstance(value, list) else value


def _remote(config: FallbackConfig) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    names = config.raw["auto_map"]
    if not config.trust_remote_code or config.folder is None:
        raise CheckpointError(
            f"{config.path}: the model's code is in its own files "
            f"({names['AutoModelForCausalLM']}), which tk does not run. --trust-remote-code runs "
            f"them, with all rights that this process has."
        )
    elsewhere = [name for name in names.values() if "--" in str(name)]
    if elsewhere:
        raise CheckpointError(
            f"{config.path}: auto_map names code of another repository, {elsewhere[0]}. tk runs "
            f"only files in the model's folder: copy them there and remove the part before --."
        )
    folder = str(config.folder)
    _warn_of_code(folder)
    parsed = get_class_from_dynamic_module(names["AutoConfig"], folder).from_dict(config.raw)
    return get_class_from_dynamic_module(names["AutoModelForCausalLM"], folder), parsed


@cache  # the config is read several times
def _warn_of_code(folder: str) -> None:
    logger.warning(
        "running the Python code of %s (--trust-remote-code). It has all rights of this process: "
        "files, network, keys in the environment",
        folder,
    )


def _refusal(config: FallbackConfig, why: str) -> CheckpointError:
    return CheckpointError(
        f"{config.path}: unsupported architecture {config.architectures[0]!r}: {why}. "
        f"docs/architectures.md lists what runs."
    )


def instantiate(
    cls: type[PreTrainedModel], config: PreTrainedConfig, attention: str, dtype: torch.dtype
) -> PreTrainedModel:
    """Return a model with real buffers and parameters on the meta device. Buffers are on the CPU
    unless the default device is meta.

    `attention`: name of the attention function."""
    text = config.get_text_config()
    for one in {id(c): c for c in (config, text)}.values():
        for name in ("use_cache", "output_router_logits", "output_attentions"):
            if hasattr(one, name):
                setattr(one, name, False)
    options = {"attn_implementation": attention, "dtype": dtype}
    if cls._can_set_experts_implementation():
        options["experts_implementation"] = EXPERTS
    is_meta = torch.get_default_device().type == "meta"
    with torch.device("meta" if is_meta else "cpu"), _parameters_on_meta():
        model: PreTrainedModel = cls._from_config(config, **options)
        model.tie_weights()
        _keep_in_float32(model, dtype)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            # Else some search the tokens for it, on the host, to warn.
            vars(module.config)["pad_token_id"] = None
    return model.eval()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move parameters to the meta device as they are registered. Buffers are computed."""
    register = nn.Module.register_parameter

    def moved(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = moved  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _keep_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give the parameters that stay in fp32 that type."""
    names = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        names |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    pattern = "|".join(rf"(^|\.){name}(\.|$)" for name in sorted(names))
    for prefix, module in model.named_modules() if names else ():
        for name, parameter in module._parameters.items():
            if parameter is not None and re.search(pattern, f"{prefix}.{name}"):
                module._parameters[name] = nn.Parameter(parameter.float(), requires_grad=False)


def settle_rotations(base: nn.Module, max_model_len: int) -> None:
    """Fix rotations that depend on the length of the sequence to that of the longest one.

    Transformers recomputes them from the longest position of each batch, on the host."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    module: Any
    for module in base.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            if _depends_on_length(kinds):
                values, module.attention_scaling = ROPE_INIT_FUNCTIONS[kinds](
                    module.config, None, seq_len=max_model_len
                )
                module.inv_freq = values
                module.rope_type = "default"
        elif isinstance(kinds, dict):
            for layer_type, kind in kinds.items():
                if _depends_on_length(kind):
                    values, scaling = ROPE_INIT_FUNCTIONS[kind](
                        module.config, None, seq_len=max_model_len, layer_type=layer_type
                    )
                    setattr(module, f"{layer_type}_inv_freq", values)
                    setattr(module, f"{layer_type}_attention_scaling", scaling)
                    kinds[layer_type] = "default"


def _depends_on_length(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"
