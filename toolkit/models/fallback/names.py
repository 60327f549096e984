"""Map a checkpoint's tensors to the parameters of a Transformers model.

Transformers renames tensors of some architectures, and builds some parameters out of several
tensors (the experts of a layer become one). Its own mapping says how."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from toolkit.distributed import Shard, full_shard
from toolkit.errors import CheckpointError
from toolkit.weights.slots import JoinedSlot, Slot, Slots


@dataclass(eq=False, slots=True)
class _Group:
    """Tensors that become parameters together."""

    name: str  # of the first parameter
    converter: WeightConverter
    model: PreTrainedModel
    targets: Slots  # of all parameters of the model
    sources: list[tuple[str, str]] = field(default_factory=list)  # names, patterns that they match
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Names of the parameters."""
        first, *others = self.converter.target_patterns
        return [self.name, *(self.name.replace(first, other) for other in others)]

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor. The last one fills the parameters."""
        device = self.targets[self.name].parts[0].target.device
        self.tensors[name] = tensor.to(device, copy=True)
        if len(self.tensors) < len(self.sources):
            return
        for source, pattern in self.sources:
            self.converter.add_tensor(self.name, source, pattern, self.tensors.pop(source))
        try:
            made = self.converter.convert(self.name, model=self.model, config=self.model.config)
        except Exception as error:  # whatever tensors of other shapes or numbers cause
            text = " ".join(str(error).split())
            raise CheckpointError(
                f"{len(self.sources)} tensors of the checkpoint, {self.sources[0][0]} and others, "
                f"cannot be joined into {self.name}: {text} Check whether a file is missing."
            ) from None
        for target, value in made.items():
            tensor = value[0] if isinstance(value, list) else value
            slot = self.targets.get(target)
            if slot is None or tuple(tensor.shape) != slot.shape:
                wanted = "no such parameter" if slot is None else list(slot.shape or ())
                raise CheckpointError(
                    f"The checkpoint's tensors {self.sources[0][0]}, … make {target} of the shape "
                    f"{list(tensor.shape)}; the model has {wanted}."
                )
            for part in slot.parts:
                part.fill(tensor[tuple(slice(s.begin, s.begin + s.count) for s in part.region)])


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupSlot(Slot):
    """Destination of a tensor of a group."""

    group: _Group
    name: str
    size: tuple[int, ...]

    @property
    def needs_all_rows(self) -> bool:
        return True

    @property
    def region(self) -> tuple[Shard, ...]:
        return tuple(map(full_shard, self.size))

    def fill(self, tensor: torch.Tensor) -> None:
        self.group.add(self.name, tensor)


def checkpoint_slots(
    model: PreTrainedModel,
    targets: Slots,
    tied: Mapping[str, str],
    tensors: Mapping[str, tuple[int, ...]],
) -> Slots:
    """Return the slots of a checkpoint's tensors (shapes by name).

    `targets`: slots of the model's parameters. `tied`: names that share another parameter.
    Parameters that no tensor fills are included, by their own name."""
    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    known = {**targets, **dict.fromkeys(tied, True)}
    prefix = model.base_model_prefix
    slots: Slots = {}
    groups: dict[str, _Group] = {}
    filled: set[str] = set()
    copies: list[tuple[str, str]] = []  # tensors of tied parameters, and what these share
    for name in sorted(tensors, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if renamed not in known and name in known:
            renamed, pattern = name, None
        if renamed in tied:
            copies.append((name, tied[renamed]))
        elif renamed in targets and pattern is None:
            slots[name] = targets[renamed]
            filled.add(renamed)
        elif renamed in targets:
            assert pattern is not None
            group = groups.get(renamed)
            if group is None:
                converter = deepcopy(by_pattern[pattern])
                group = groups[renamed] = _Group(renamed, converter, model, targets)
                filled.update(group.names)
            group.sources.append((name, pattern))
            target = targets[renamed].parts[0].target
            slots[name] = _GroupSlot(target, group=group, name=name, size=tensors[name])
        elif _is_ignored(model, name):
            slots[name] = JoinedSlot(tensors[name], ())
    for name, shared in copies:
        slots[name] = JoinedSlot(tensors[name], ()) if shared in filled else targets[shared]
        filled.add(shared)
    return slots | {name: slot for name, slot in targets.items() if name not in filled}


def _is_ignored(model: PreTrainedModel, name: str) -> bool:
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)
