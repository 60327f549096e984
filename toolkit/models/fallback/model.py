"""Transformers' model as a `CausalLM`: their layers, our attention, cache, products and norms."""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from toolkit.attention import AttentionBatch, AttentionShape
from toolkit.distributed import current_group, current_stage
from toolkit.errors import CheckpointError, ToolkitError
from toolkit.layers import OutputHead
from toolkit.models.describe import External
from toolkit.models.fallback.build import (
    find_class,
    instantiate,
    settle_rotations,
)
from toolkit.models.fallback.config import FallbackConfig
from toolkit.models.fallback.names import checkpoint_slots
from toolkit.models.fallback.probe import (
    PROBE,
    Call,
    UnsupportedError,
    only_layers,
    probe,
    runs_layers,
)
from toolkit.models.fallback.swap import (
    FlatLinear,
    FlatNorm,
    WeightReadError,
    swap_norms,
    swap_products,
)
from toolkit.models.model import CausalLM, Keeper, PagedAttention, default_dtype
from toolkit.weights.kinds.plain import PlainWeight
from toolkit.weights.slots import JoinedSlot, Slot, Slots

ATTENTION = "tk"  # name of our attention function
logger = logging.getLogger(__name__)


class TransformersModel(CausalLM):
    """A decoder that Transformers computes, but for attention, products and norms."""

    may_synchronize = True

    def __init__(self, config: FallbackConfig, description: External, max_model_len: int) -> None:
        self.group = current_group()
        assert current_stage().count == 1
        cls, parsed = find_class(config)
        dtype, device = torch.get_default_dtype(), torch.get_default_device()
        length = max(max_model_len, config.max_positions)
        text = parsed.to_json_string()
        plan = _make_plan(cls, text, length, self.group.size)  # type: ignore[arg-type]  # hashable
        hf = instantiate(cls, parsed, ATTENTION, dtype)
        theirs = hf.get_output_embeddings()
        vocab_size, hidden_size = theirs.weight.shape
        super().__init__(vocab_size, hidden_size)
        self.hf, self._plan = hf, plan
        settle_rotations(hf.base_model, max_model_len)
        self._tied = dict(getattr(hf, "all_tied_weights_keys", None) or {})
        self.lm_head = self._make_head(theirs)
        swap_products(hf, set(plan.kept))
        _materialize(hf, device)
        if device.type != "meta":
            swap_norms(hf, dtype, device)
            logger.info(
                "%s runs through Transformers %s with tk's attention, cache and products. An "
                "architecture of tk's own would be faster (docs/models.md)",
                cls.__name__,
                transformers.__version__,
            )
        self._attention = [self._attach(call) for call in plan.calls]
        self._head_shell = (_without_base(hf),)  # a tuple, so that it is no submodule

    def _make_head(self, theirs: nn.Module) -> OutputHead:
        """Put our output head in the place of theirs. Their embedding shares its weight if tied."""
        name = next(name for name, module in self.hf.named_modules() if module is theirs)
        head = OutputHead(self.hidden_size, self.vocab_size, bias=theirs.bias is not None)
        self.hf.set_submodule(name, _Head(head))
        embedding, weight = self.hf.get_input_embeddings(), head.weight
        is_tied = theirs.weight is embedding.weight and self.group.size == 1
        if is_tied and isinstance(weight, PlainWeight):
            rows = weight.values[: self.vocab_size]
            embedding.weight = nn.Parameter(rows, requires_grad=False)
        return head

    def _attach(self, call: Call) -> PagedAttention:
        """Add our attention to the module that calls it."""
        module, sinks = self.hf.get_submodule(call.path), None
        if call.sinks is not None:
            sinks = nn.Parameter(getattr(module, call.sinks).float(), requires_grad=False)
            setattr(module, call.sinks, sinks)  # in fp32, as our kernels read them
        shape = AttentionShape(
            call.num_heads,
            call.num_kv_heads,
            call.key_size,
            call.scale,
            sliding_window=call.window,
            soft_cap=call.soft_cap,
            sinks=sinks,
        )
        attention = PagedAttention(shape)
        vars(module)["tk"] = attention, self
        return attention

    def forward(
        self, token_ids: torch.Tensor, batch: AttentionBatch, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.batch = batch
        out = self.hf.base_model(
            input_ids=token_ids[None].long(),
            position_ids=batch.positions[None].long(),
            use_cache=False,
        )
        states: torch.Tensor = out.last_hidden_state[0]
        return states if batch.wanted is None else states[batch.wanted]

    def logits(self, hidden: torch.Tensor, buffer: torch.Tensor | None = None) -> torch.Tensor:
        (shell,) = self._head_shell
        head = self.hf.get_output_embeddings()
        head.buffer = buffer
        logits: torch.Tensor = shell(inputs_embeds=hidden[None], use_cache=False).logits[0]
        if buffer is None or logits.data_ptr() == buffer.data_ptr():
            return logits
        return buffer[:, : logits.shape[1]].copy_(logits)

    def keepers(self) -> list[Keeper]:
        return [*self._attention]

    @contextmanager
    def with_few_layers(self) -> Iterator[None]:
        name = self._plan.layers
        if name is None:
            yield
            return
        layers = [self.hf.get_submodule(f"{name}.{index}") for index in self._plan.few]
        with only_layers(self.hf, name, layers):
            yield

    # ---- weights

    def slots(self) -> Slots:
        """Return the slots of the parameters and saved buffers, by Transformers' names."""
        slots: Slots = {}
        ours: list[str] = []
        for name, module in self.hf.named_modules():
            if isinstance(module, FlatLinear):
                slots |= module.linear.slots()
            elif isinstance(module, FlatNorm):
                slots |= module.norm.slots()
            elif isinstance(module, _Head):
                slots |= {
                    f"{name}.{own.removeprefix('lm_head.')}": slot
                    for own, slot in module.head.slots().items()
                }
            else:
                continue
            ours.append(f"{name}.")
        plain = {**dict(self.hf.named_parameters()), **_saved_buffers(self.hf)}
        for name, tensor in plain.items():
            if not name.startswith(tuple(ours)):
                slots[name] = Slot(tensor)
        for name, source in self._tied.items():
            copied = slots.pop(name, None)
            if copied is not None and not _share_storage(copied, slots[source]):
                both = [*slots[source].parts, *copied.parts]
                slots[source] = JoinedSlot(slots[source].shape, both)
        return slots

    def slots_for(self, tensors: Mapping[str, tuple[int, ...]]) -> Slots:
        return checkpoint_slots(self.hf, self.slots(), self._tied, tensors)


def _share_storage(a: Slot | JoinedSlot, b: Slot | JoinedSlot) -> bool:
    return a.parts[0].target.data_ptr() == b.parts[0].target.data_ptr()


class _Head(nn.Module):
    """Our output head in the place of theirs."""

    def __init__(self, head: OutputHead) -> None:
        super().__init__()
        self.head = head
        self.buffer: torch.Tensor | None = None  # for the next call's result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(x.reshape(-1, x.shape[-1]), self.buffer)
        return logits.view(*x.shape[:-1], -1)


class _Hidden:
    """Output of the layers. All but the hidden states is None."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]


class _Given(nn.Module):
    """Stands for the layers. Returns its input."""

    @property
    def decoder(self) -> _Given:
        """Itself: some models call the layers so (OPT)."""
        return self

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _Hidden:
        return _Hidden(inputs_embeds)


def _without_base(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model with its head but without its layers: what it does to their output."""
    shell = copy.copy(model)
    shell._modules = {**model._modules, model.base_model_prefix: _Given()}
    return shell


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend to the KV cache. query, key, value: [1, heads, num_tokens, size]."""
    size, value_size = query.shape[3], value.shape[3]
    if value_size < size:
        value = F.pad(value, (0, size - value_size))
    qkv = torch.cat([part[0].transpose(0, 1) for part in (query, key, value)], dim=1)
    attention, model = vars(module)["tk"]
    out: torch.Tensor = attention(qkv.flatten(1), model.batch)
    return out.view(len(qkv), -1, size)[None, ..., :value_size], None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Findings about a model, before it is built."""

    calls: list[Call]  # of attention, on each rank
    kept: set[str]  # patterns of products that must stay theirs
    layers: str | None  # name of the list of layers; None: they only run all together
    few: list[int]  # layers that launch the kernels of all


@cache
def _make_plan(cls: Any, config: str, length: int, num_ranks: int) -> _Plan:
    """`config`: JSON. Raises CheckpointError if the model cannot run."""
    kept: set[str] = set()
    # In bf16: on the meta device, products of experts accept no other type.
    with torch.device("meta"), default_dtype(torch.bfloat16):
        while True:
            parsed = cls.config_class.from_dict(json.loads(config))
            try:
                model = instantiate(cls, parsed, PROBE, torch.bfloat16)
                settle_rotations(model.base_model, length)
                swap_products(model, kept)
                calls = probe(model, length)
                break
            except WeightReadError as error:
                kept.add(str(error))
            except UnsupportedError as error:
                raise CheckpointError(
                    f"Unsupported architecture {cls.__name__!r}: {error}."
                ) from None
            except ToolkitError:
                raise
            except Exception as error:  # any model's code runs here
                text = " ".join(str(error).split())[:300]
                raise CheckpointError(
                    f"Unsupported architecture {cls.__name__!r}: its layers cannot run with tk's "
                    f"attention ({type(error).__name__}: {text})."
                ) from None
        layers, few = _few_layers(model, calls)
        return _Plan(calls, kept, layers, few)


def _few_layers(model: PreTrainedModel, calls: Sequence[Call]) -> tuple[str | None, list[int]]:
    """Return (name of the list of layers, indices of one layer of each kind and of the last)."""
    names = {re.split(r"\.\d+\.", call.path)[0] for call in calls}
    if len(names) != 1:
        return None, []
    (name,) = names
    layers, kinds = list(model.get_submodule(name).children()), {}
    if len(layers) != len(calls):
        return None, []
    for index, (layer, call) in reversed(list(enumerate(zip(layers, calls, strict=True)))):
        shapes = tuple(tensor.shape for tensor in layer.parameters())
        kinds[replace(call, path=""), shapes] = index
    few = sorted({*kinds.values(), len(layers) - 1})
    runs = runs_layers(model, name, [layers[index] for index in few])
    return (name, few) if runs else (None, [])


def _materialize(model: PreTrainedModel, device: torch.device) -> None:
    """Allocate parameters that are on the meta device, and move buffers."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta or device.type == "meta":
                continue
            is_vector = parameter.dim() < 2
            make = torch.empty if not is_vector else torch.ones if name == "weight" else torch.zeros
            module._parameters[name] = nn.Parameter(
                make(parameter.shape, dtype=parameter.dtype, device=device), requires_grad=False
            )


def _saved_buffers(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the buffers that checkpoints have."""
    return {
        f"{prefix}.{name}": buffer
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }
