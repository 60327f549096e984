"""The weights of a checkpoint in fp32, under its own names: for other programs than tk."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from toolkit.distributed import full_shard
from toolkit.gguf.folder import is_gguf
from toolkit.weights.collected import Projection
from toolkit.weights.formats import Packings
from toolkit.weights.gguf import reader as gguf
from toolkit.weights.groups import Decoded
from toolkit.weights.loader import stored_tensors
from toolkit.weights.safetensors import read_into
from toolkit.weights.slots import Slot


@torch.inference_mode()
def read_dense(
    folder: Path, packings: Packings, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, torch.Tensor]:
    """Return the weights of a quantized checkpoint in fp32.

    shapes: [rows, columns] of the weights by name. Others are read as they are stored. Raises
    CheckpointError as loading does."""
    stored = stored_tensors(folder)
    dense: dict[str, torch.Tensor] = {}
    found, projections = [], {}
    for tensor in stored:
        name = tensor.name.rpartition(".weight")[0] or tensor.name.rpartition(".")[0]
        packing = packings.find(name)
        shape = shapes.get(f"{name}.weight")
        if packing is None or shape is None or tensor.name == f"{name}.bias":
            dense[tensor.name] = torch.empty(tensor.shape)
            slots = [Slot(dense[tensor.name])]
        else:
            if name not in projections:
                shards = full_shard(shape[0]), full_shard(shape[1])
                write = partial(_keep, dense, f"{name}.weight")
                projections[name] = Projection(name, packing, shards, torch.device("cpu"), write)
            slot = projections[name].slots().get(tensor.name.removeprefix(f"{name}."))
            slots = list(slot.parts) if slot is not None else []
        for own in slots:
            own.announce()
            part = tensor.part(own.region)
            found.append((part, gguf.slot_of(part, own) if is_gguf(folder) else own))
    read_into(found, threading.Event())
    return dense


def _keep(dense: dict[str, torch.Tensor], name: str, decoded: Decoded) -> None:
    if not isinstance(decoded, torch.Tensor):
        decoded = decoded.dequantize()
    dense[name] = decoded
