"""The weights of a checkpoint in fp32, under its own names: for other programs than tk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from toolkit.distributed import full_shard
from toolkit.weights.formats import Packing, Packings
from toolkit.weights.groups import Decoded
from toolkit.weights.loading.collected import Projection
from toolkit.weights.loading.loader import stored_tensors
from toolkit.weights.loading.safetensors import read_into
from toolkit.weights.slots import Slot, StackedSlot


@torch.inference_mode()
def read_dense(
    folder: Path, packings: Packings, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, torch.Tensor]:
    """Return the weights of a quantized checkpoint in fp32.

    shapes: [rows, columns] of the weights by name, [experts, columns, rows] of those that are
    stacked. Others are read as they are stored. Raises CheckpointError as loading does."""
    dense: dict[str, torch.Tensor] = {}
    packed: dict[str, list[Slot]] = {}  # by tensor
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        packing = packings.find(module)
        if packing is not None:
            for stored, parts in _slots(dense, name, packing, shape):
                packed.setdefault(stored, []).extend(parts)
    found = []
    for tensor in stored_tensors(folder):
        slots = packed.get(tensor.name)
        if slots is None:
            dense[tensor.name] = torch.empty(tensor.shape)
            slots = [Slot(dense[tensor.name])]
        for own in slots:
            own.announce()
            part = tensor.part(own.region)
            found.append((part, part.slot_for(own)))
    read_into(found, threading.Event())
    return dense


def _slots(
    dense: dict[str, torch.Tensor], name: str, packing: Packing, shape: tuple[int, ...]
) -> Iterator[tuple[str, Sequence[Slot]]]:
    """Yield (name, slots) of the tensors of a weight, which fill an entry of `dense`."""
    if len(shape) == 2:
        write = partial(_keep, dense, name)
        for kind, slot in _projection(name, packing, shape, write).slots().items():
            yield f"{name.removesuffix('.weight')}.{kind}", slot.parts
        return
    dense[name] = torch.empty(shape)
    for index, weight in enumerate(dense[name].mT):
        write = partial(_fill, weight)
        for kind, slot in _projection(name, packing, weight.shape, write).slots().items():
            yield f"{name}_{kind}", StackedSlot.of(slot, (index, len(dense[name]))).parts


def _projection(
    name: str, packing: Packing, shape: tuple[int, ...], write: Callable[[Decoded], None]
) -> Projection:
    shards = full_shard(shape[0]), full_shard(shape[1])
    return Projection(name, packing, shards, torch.device("cpu"), write)


def _keep(dense: dict[str, torch.Tensor], name: str, decoded: Decoded) -> None:
    dense[name] = _dequantized(decoded)


def _fill(weight: torch.Tensor, decoded: Decoded) -> None:
    weight.copy_(_dequantized(decoded))


def _dequantized(decoded: Decoded) -> torch.Tensor:
    return decoded if isinstance(decoded, torch.Tensor) else decoded.dequantize()
