"""The adapters of a model on one rank: read from disk, and placed in slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from toolkit.distributed import Shard
from toolkit.errors import CheckpointError
from toolkit.kernels.table import Kernels
from toolkit.layers import Linear, OutputHead
from toolkit.lora.gpu_weight import GPUActive, GPUAdaptedWeight
from toolkit.lora.peft import Pair, read_adapter
from toolkit.lora.weight import Active, Adapted, AdaptedWeight, Part
from toolkit.sequence import Adapter
from toolkit.weights.source import Source

HostAdapter = dict[Adapted, list[Part]]
"""An adapter in the host's memory: this rank's parts of it."""


class Adapters:
    """Adds adapters to a model's projections, which a step finds by slot."""

    active: Active | GPUActive

    def __init__(
        self,
        model: nn.Module,
        complete: nn.Module,
        max_rank: int,
        num_slots: int,
        dtype: torch.dtype = torch.float32,
        kernels: Kernels | None = None,
    ) -> None:
        """Prepare all projections. Called before the weights are finished.

        complete: the model with all pipeline stages, without weights. num_slots: adapters that may
        be placed at once. dtype: of the model. kernels: of its GPU."""
        self.active = Active() if kernels is None else GPUActive(num_slots, kernels.rank_block)
        self._dtype = torch.float32 if kernels is None else dtype
        self.max_rank = max_rank
        self._names = {one.name for linear in _linears(complete) for one in linear.sources}
        self._weights: list[Adapted] = []
        self._read: dict[str, HostAdapter] = {}  # by key
        self._places: dict[str, list[tuple[Adapted, Linear, int, int]]] = {}
        """Places of a projection by its name: (weight, layer, number of its part, first row)."""
        for linear in _linears(model):
            linear.weight = weight = self._adapted(linear, max_rank, dtype, kernels)
            self._weights.append(weight)
            first = 0
            for index, (source, part) in enumerate(zip(linear.sources, linear.parts, strict=True)):
                self._places.setdefault(source.name, []).append((weight, linear, index, first))
                first += part.count

    def _adapted(
        self, linear: Linear, max_rank: int, dtype: torch.dtype, kernels: Kernels | None
    ) -> Adapted:
        if kernels is None:
            assert isinstance(self.active, Active)
            return AdaptedWeight(linear.weight, self.active)
        assert isinstance(self.active, GPUActive)
        counts = [part.count for part in linear.parts]
        return GPUAdaptedWeight(linear.weight, self.active, counts, max_rank, dtype, kernels)

    def read(self, adapter: Adapter) -> None:
        """Read this rank's parts of an adapter, for `place`. From any thread.

        Raises CheckpointError."""
        name, folder, found = adapter.name, Path(adapter.folder), HostAdapter()
        for module, pair in read_adapter(name, folder, self.max_rank).items():
            known = self._known(module)
            if known is None:
                raise CheckpointError(
                    f"adapter {name!r} ({folder}): it changes {module}, which is no linear layer "
                    f"of this model. It may be for another base model."
                )
            for weight, linear, index, first in self._places.get(known, ()):
                rows = slice(first, first + linear.parts[index].count)
                own = _shard(pair, linear.sources[index], linear.parts[index], linear.columns)
                if own is None:
                    raise CheckpointError(
                        f"adapter {name!r} ({folder}): {module} adds [{len(pair.up)}, "
                        f"{pair.low.shape[1]}] to a weight of another shape. It is for another "
                        f"base model."
                    )
                own = Pair(own.low.to(self._dtype), own.up.to(self._dtype))
                found.setdefault(weight, []).append(Part(rows, own))
        self._read[adapter.key] = found

    def forget(self, adapter: Adapter) -> None:
        """Free the memory of an adapter. No request needs it."""
        self._read.pop(adapter.key, None)

    def place(self, slot: int, key: str) -> None:
        """Put an adapter that was read into a slot, from 1. Between steps, on their stream."""
        parts = self._read[key]
        ranks = [len(part.pair.low) for several in parts.values() for part in several]
        self.active.place(slot, max(ranks, default=0))
        for weight in self._weights:
            weight.place(slot, parts.get(weight, []))

    def _known(self, module: str) -> str | None:
        """Return a projection's name in the checkpoint, which may lack the first parts."""
        parts = module.split(".")
        names = (".".join(parts[begin:]) for begin in range(len(parts)))
        return next((name for name in names if name in self._names), None)


def _linears(model: nn.Module) -> list[Linear]:
    """Return the layers that may have adapters."""
    modules = model.modules()
    return [one for one in modules if isinstance(one, Linear) and not isinstance(one, OutputHead)]


def _shard(pair: Pair, source: Source, rows: Shard, columns: Shard) -> Pair | None:
    """Return a rank's part of the factors. None: they have another shape."""
    order: Any = range(rows.begin, rows.begin + rows.count)
    total = rows.total
    if source.order is not None:
        order, total = source.order.rows[rows.begin : rows.begin + rows.count], source.order.total
    if pair.up.shape[0] != total or pair.low.shape[1] != columns.total:
        return None
    low = pair.low[:, columns.begin : columns.begin + columns.count]
    return Pair(low.contiguous(), pair.up[list(order)].contiguous())
