"""The adapters of a model on one rank: read from disk, and placed in slots."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from toolkit.distributed import Shard, full_shard
from toolkit.errors import CheckpointError
from toolkit.kernels.table import TritonKernels
from toolkit.layers import Experts, Linear, OutputHead, Router, VocabularyEmbedding
from toolkit.lora.gpu_weight import GPUActive, GPUAdaptedTable, GPUAdaptedWeight
from toolkit.lora.peft import Pair, read_adapter, read_config
from toolkit.lora.weight import Active, Adapted, AdaptedTable, AdaptedWeight, Part, StepActive
from toolkit.sequence import Adapter
from toolkit.weights.source import Source


class HostAdapter(NamedTuple):
    """An adapter in the host's memory: this rank's parts of it."""

    rank: int  # the highest
    parts: dict[Adapted, list[Part]]  # packed


class Adapters:
    """Adds adapters to a model's projections, which a step finds by slot."""

    active: StepActive

    def __init__(
        self,
        model: nn.Module,
        complete: nn.Module,
        max_rank: int,
        num_slots: int,
        dtype: torch.dtype = torch.float32,
        kernels: TritonKernels | None = None,
        *,
        ends: bool = True,
    ) -> None:
        """Prepare all projections. Called before the weights are finished.

        complete: the model with all pipeline stages, without weights. num_slots: adapters that may
        be placed at once. dtype: of the model. kernels: of its GPU. ends: prepare the embeddings
        and the output head, too."""
        self.active = (
            Active(num_slots) if kernels is None else GPUActive(num_slots, kernels.rank_block)
        )
        self.max_rank, self.has_ends = max_rank, ends
        self._dtype = torch.float32 if kernels is None else dtype  # of placed factors
        self._names = {one.name for linear in _linears(complete) for one in linear.sources}
        self._unread = getattr(complete, "unused", ())  # of the model, and so of adapters
        self._ends = {one.name for head in _heads(complete) for one in head.sources}
        self._ends |= {table.name for table in _tables(complete)}
        self._in_experts = {
            name.removesuffix(".weight")
            for experts in complete.modules()
            if isinstance(experts, Experts | Router)
            for module in experts.modules()
            if isinstance(module, Experts | Linear)
            for name in module.slots()
        }
        self._weights: list[Adapted] = []
        self._read: dict[str, HostAdapter] = {}  # by key
        self._places: dict[str, list[_Place]] = {}  # of a projection, by its name
        for linear in _linears(model):
            linear.weight = self._adapted(linear, kernels)
            self._add(linear, linear.weight)
        if ends:
            self._adapt_ends(model, kernels)

    def _adapt_ends(self, model: nn.Module, kernels: TritonKernels | None) -> None:
        """Prepare the embeddings and the output head."""
        self._names |= self._ends
        for head in _heads(model):
            head.weight = self._adapted(head, kernels)
            self._add(head, head.weight)
        for table in _tables(model):
            hidden = full_shard(table.weight.shape[1])
            weight = self._adapted_table(table, hidden.count, kernels)
            table.weight = weight
            self._weights.append(weight)
            self._places[table.name] = [_Place(weight, Source(table.name), hidden, table.shard, 0)]

    def _add(self, linear: Linear, weight: Adapted) -> None:
        self._weights.append(weight)
        first = 0
        for source, rows in zip(linear.sources, linear.parts, strict=True):
            place = _Place(weight, source, rows, linear.columns, first)
            self._places.setdefault(source.name, []).append(place)
            first += rows.count

    def _adapted(self, linear: Linear, kernels: TritonKernels | None) -> Adapted:
        is_head = isinstance(linear, OutputHead)
        if kernels is None:
            assert isinstance(self.active, Active)
            return AdaptedWeight(linear.weight, self.active, self.max_rank * len(linear.parts))
        assert isinstance(self.active, GPUActive)
        # The head's weight ends with padding.
        counts = [linear.weight.shape[0]] if is_head else [part.count for part in linear.parts]
        return GPUAdaptedWeight(
            linear.weight, self.active, counts, self.max_rank, self._dtype, kernels
        )

    def _adapted_table(
        self, table: VocabularyEmbedding, hidden: int, kernels: TritonKernels | None
    ) -> Adapted:
        if kernels is None:
            assert isinstance(self.active, Active)
            return AdaptedTable(table.weight, self.active, self.max_rank)
        assert isinstance(self.active, GPUActive)
        return GPUAdaptedTable(
            table.weight,
            self.active,
            [hidden],
            self.max_rank,
            self._dtype,
            kernels,
            columns=table.shard.count,
        )

    def read(self, adapter: Adapter) -> None:
        """Read this rank's parts of an adapter, for `place`. From any thread.

        Raises CheckpointError."""
        name, folder = adapter.name, Path(adapter.folder)
        found: dict[Adapted, list[Part]] = {}
        modules: dict[str, str] = {}  # by projection
        for module, pair in read_adapter(name, folder, self.max_rank, self._dtype).items():
            known = self._known(module)
            if known is None and any(part in f"{module}." for part in self._unread):
                continue
            if known is None and self._find(module, self._in_experts) is not None:
                raise CheckpointError(
                    f"adapter {name!r} ({folder}): it changes {module}, and adapters of experts "
                    f"are not supported."
                )
            if known is None:
                is_end = self._find(module, self._ends) is not None
                raise CheckpointError(
                    f"adapter {name!r} ({folder}): it changes {module}, "
                    + (
                        "for which no memory was taken. Start with --lora-embeddings."
                        if is_end
                        else "which is not a linear layer of this model. It may be for another "
                        "base model."
                    )
                )
            if (other := modules.setdefault(known, module)) != module:
                raise CheckpointError(
                    f"adapter {name!r} ({folder}): {other} and {module} are the same layer."
                )
            for place in self._places.get(known, ()):
                own = place.shard(pair)
                if own is None:
                    raise CheckpointError(
                        f"adapter {name!r} ({folder}): {module} adds [{len(pair.up)}, "
                        f"{pair.low.shape[1]}] to a weight of another shape. It is for another "
                        f"base model."
                    )
                rows = slice(place.first, place.first + place.rows.count)
                found.setdefault(place.weight, []).append(Part(rows, own))
        config = read_config(name, folder)
        missing = [one for one in self._names if one not in modules and config.must_change(one)]
        if missing:
            raise CheckpointError(
                f"adapter {name!r} ({folder}): it has no factors of {min(missing)}, which its "
                f"target_modules have."
            )
        ranks = [len(part.pair.low) for several in found.values() for part in several]
        packed = {weight: weight.pack_parts(several) for weight, several in found.items()}
        self._read[adapter.key] = HostAdapter(max(ranks, default=0), packed)

    def forget(self, adapter: Adapter) -> None:
        """Free the memory of an adapter. No request needs it."""
        self._read.pop(adapter.key, None)

    def place(self, slot: int, key: str) -> None:
        """Put an adapter that was read into a slot, from 1. Between steps, on their stream."""
        rank, parts = self._read[key]
        self.active.place(slot, rank)
        for weight in self._weights:
            weight.place(slot, parts.get(weight, []))

    def _known(self, module: str) -> str | None:
        return self._find(module, self._names)

    @staticmethod
    def _find(module: str, known: Collection[str]) -> str | None:
        """Return a projection's name in the checkpoint, which may lack the first parts."""
        parts = module.split(".")
        if parts[-1] == "embed_out":  # GPT-NeoX's name of the head
            parts[-1] = "lm_head"
        names = (".".join(parts[begin:]) for begin in range(len(parts)))
        return next((name for name in names if name in known), None)


class _Place(NamedTuple):
    """This rank's part of a projection."""

    weight: Adapted
    source: Source
    rows: Shard
    columns: Shard
    first: int  # row of the weight

    def shard(self, pair: Pair) -> Pair | None:
        """Return a rank's part of the factors. None: they have another shape."""
        rows, columns = self.rows, self.columns
        own: Any = slice(rows.begin, rows.begin + rows.count)
        total = rows.total
        if self.source.order is not None:
            own = list(self.source.order.rows[own])
            total = self.source.order.total
        if pair.up.shape[0] != total or pair.low.shape[1] != columns.total:
            return None
        low = pair.low[:, columns.begin : columns.begin + columns.count]
        return Pair(low, pair.up[own], pair.scale)


def _linears(model: nn.Module) -> list[Linear]:
    """Return the layers that may have adapters."""
    in_experts = {
        id(module)
        for experts in model.modules()
        if isinstance(experts, Experts | Router)
        for module in experts.modules()
    }
    return [
        one
        for one in model.modules()
        if isinstance(one, Linear) and not isinstance(one, OutputHead) and id(one) not in in_experts
    ]


def _heads(model: nn.Module) -> list[OutputHead]:
    return [one for one in model.modules() if isinstance(one, OutputHead)]


def _tables(model: nn.Module) -> list[VocabularyEmbedding]:
    return [one for one in model.modules() if isinstance(one, VocabularyEmbedding)]
