"""Find out what each layer of a Transformers model attends to, by one forward pass without memory.

The attention function and the mask function of the pass record their arguments. The window comes
from the mask that a layer got, evaluated for some positions: what a config says about windows need
not be what the model does."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

PROBE = "tk_probe"  # name of the recording attention function
TOKENS = 5
_POSITIONS = "create_position_ids_from_input_ids"
"""Function of models that do not count positions from 0 (RoBERTa)."""
_HARMLESS = {
    *("dropout", "position_ids", "cache_position", "target_dtype", "is_causal", "use_cache"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
}
"""Arguments of attention that do not change its result, in a causal model without dropout."""
_READ = {"scaling", "sliding_window", "softcap", "s_aux"}
MaskFunction = Callable[[Any, Any, Any, Any], Any]


class UnsupportedError(Exception):
    """The model does something that paged attention does not compute. Its text is the reason."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of attention."""

    path: str  # name of the attention module
    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    scale: float
    window: int = 0  # tokens, with the query itself; 0: no window
    soft_cap: float = 0.0
    sinks: str | None = None  # name of the module's parameter


def probe(model: PreTrainedModel, max_positions: int) -> list[Call]:
    """Return the calls of attention in a forward pass of a model on the meta device.

    Raises UnsupportedError if paged attention cannot compute them."""
    calls: list[Call] = []
    masks: dict[int, tuple[torch.Tensor, MaskFunction]] = {}
    paths = {id(module): name for name, module in model.named_modules()}

    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        call = _read_call(paths.get(id(module), "?"), module, query, key, value, options)
        window = _window_of(attention_mask, masks, max_positions)
        if window is None and masks and not call.window:
            raise UnsupportedError(f"{call.path} attends without the model's mask")
        if window is not None and call.window not in (0, window):
            raise UnsupportedError(
                f"{call.path} asks for a window of {call.window} tokens, and its mask has {window}"
            )
        calls.append(replace(call, window=window or call.window))
        shape = *query.shape[:1], query.shape[2], query.shape[1], value.shape[3]
        return query.new_empty(shape), None

    def mask(*_: Any, mask_function: MaskFunction, q_length: int, kv_length: int, **__: Any) -> Any:
        made = torch.empty(1, 1, q_length, kv_length, dtype=torch.bool, device="meta")
        masks[id(made)] = made, mask_function
        return made

    positions = torch.arange(TOKENS, device="meta")[None]
    seen = _Uses(positions)
    with _registered(attend, mask), seen:
        _run(model, positions)
    num_layers = model.config.get_text_config().num_hidden_layers
    if len(calls) != num_layers or len({call.path for call in calls}) != num_layers:
        raise UnsupportedError(
            f"{len({call.path for call in calls})} of its {num_layers} layers attend through the "
            f"interface, in {len(calls)} calls"
        )
    if not seen.found:
        raise UnsupportedError("it ignores position_ids")
    if hasattr(sys.modules[type(model).__module__], _POSITIONS) or any(
        hasattr(module, _POSITIONS) for module in model.modules()
    ):
        raise UnsupportedError("its positions depend on padding")
    shapes = {(call.num_kv_heads, call.key_size) for call in calls}
    if len(shapes) > 1:
        raise UnsupportedError(
            f"its layers have keys of several shapes (heads, size): {sorted(shapes)}"
        )
    return calls


def runs_layers(model: PreTrainedModel, name: str, layers: Sequence[nn.Module]) -> bool:
    """Return True if the model on the meta device also runs with only these layers."""

    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, None]:
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None

    try:
        with _registered(attend, lambda *_, **__: None), only_layers(model, name, layers):
            _run(model, torch.arange(TOKENS, device="meta")[None])
    except Exception:  # it counts on all of its layers
        return False
    return True


@contextlib.contextmanager
def only_layers(model: PreTrainedModel, name: str, layers: Sequence[nn.Module]) -> Iterator[None]:
    """Let the list of layers with this name contain only these inside the block."""
    parent = model.get_submodule(name)
    before = parent._modules
    parent._modules = {str(index): layer for index, layer in enumerate(layers)}
    try:
        yield
    finally:
        parent._modules = before


def _run(model: PreTrainedModel, positions: torch.Tensor) -> None:
    with torch.device("meta"):
        ids = torch.zeros(1, TOKENS, dtype=torch.int64)
        model.base_model(input_ids=ids, position_ids=positions, use_cache=False)


def _read_call(
    path: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: dict[str, Any],
) -> Call:
    for name, option in options.items():
        if option is not None and option is not False and name not in _HARMLESS | _READ:
            raise UnsupportedError(f"{path} passes {name} to attention, which tk does not know")
    is_causal = options.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if not is_causal:
        raise UnsupportedError(f"{path} is not causal")
    batch, num_heads, tokens, key_size = query.shape
    num_kv_heads = key.shape[1]
    if (batch, tokens) != (1, TOKENS) or key.shape[2] != TOKENS or num_heads % num_kv_heads:
        raise UnsupportedError(
            f"{path} attends with queries {list(query.shape)} over keys {list(key.shape)}"
        )
    if value.shape[3] > key_size:
        raise UnsupportedError(f"{path} has values larger than keys")
    scale, sinks = options.get("scaling"), options.get("s_aux")
    return Call(
        path,
        num_heads,
        num_kv_heads,
        key_size,
        value.shape[3],
        key_size**-0.5 if scale is None else float(scale),
        window=int(options.get("sliding_window") or 0),
        soft_cap=float(options.get("softcap") or 0.0),
        sinks=_name_of(sinks, module, path),
    )


def _name_of(sinks: torch.Tensor | None, module: nn.Module, path: str) -> str | None:
    if sinks is None:
        return None
    for name, parameter in module.named_parameters(recurse=False):
        if parameter is sinks:
            return name
    raise UnsupportedError(f"{path} computes its sinks")


def _window_of(
    mask: Any, masks: dict[int, tuple[torch.Tensor, MaskFunction]], length: int
) -> int | None:
    """Return the window of a mask, 0 for none; None without a mask.

    Raises UnsupportedError unless the mask is causal, with or without a window."""
    if mask is None:
        return None
    if id(mask) not in masks:
        raise UnsupportedError("it makes an attention mask of its own")
    visible = masks[id(mask)][1]
    keys, zero = torch.arange(length, device="cpu"), torch.tensor(0, device="cpu")
    window = None
    for query in sorted({length - 1, length // 2, length // 3, 1, 0}, reverse=True):
        row = visible(zero, zero, torch.tensor(query, device="cpu"), keys)
        row = torch.as_tensor(row, device="cpu").expand(length)
        (first, *_), count = row.nonzero()[:, 0].tolist() or [-1], int(row.sum())
        if window is None:
            window = 0 if count == length else count
        begin = max(0, query - window + 1) if window else 0
        if (first, count) != (begin, query + 1 - begin) or not row[begin : query + 1].all():
            raise UnsupportedError("its attention mask is not that of a causal window")
    return window


class _Uses(TorchFunctionMode):
    """Finds out if an operation reads a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self._tensor, self.found = tensor, False

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name not in ("__get__", "size", "dim"):
            self.found |= any(arg is self._tensor for arg in (*args, *(kwargs or {}).values()))
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def _registered(attend: Any, mask: Any) -> Iterator[None]:
    """Register the recording functions. Positions are not searched for packed sequences: the host
    would have to know them."""
    ALL_ATTENTION_FUNCTIONS.register(PROBE, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(PROBE, mask)
    find = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find
        ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(PROBE, None)
        ALL_ATTENTION_FUNCTIONS.register(PROBE, _refuse)


def _refuse(*_: object, **__: object) -> None:
    raise AssertionError("attention outside of a probe")


ALL_ATTENTION_FUNCTIONS.register(PROBE, _refuse)  # models are made with its name
