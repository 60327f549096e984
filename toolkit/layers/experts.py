"""Experts: gated MLPs, a few of which are chosen for each token (Shazeer et al., 2017)."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn

from toolkit.distributed import (
    SINGLE,
    Shard,
    current_group,
    even_shard,
    full_shard,
    parallel,
    splits_experts,
)
from toolkit.kernels import reference
from toolkit.kernels.gates import Gate
from toolkit.kernels.reference import Routing
from toolkit.kernels.table import TritonKernels, kernels_for
from toolkit.layers.linear import GatedLinear, Linear, MergedLinear
from toolkit.weights.loading.collected import packed_slots
from toolkit.weights.quantization import find_packing, new_stack, unquantized
from toolkit.weights.slots import UNREAD, JoinedSlot, Slot, Slots, StackedSlot, joined_slot
from toolkit.weights.source import Source
from toolkit.weights.weight import StackableWeight, parameter


@dataclass(frozen=True, slots=True)
class Projections:
    """The tensors of one expert, in a checkpoint."""

    gate: Source
    up: Source
    down: Source


class Router(nn.Module):
    """Chooses experts. Its weight is never quantized."""

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        source: Source,
        routing: Routing,
        bias: tuple[str, tuple[int, ...]] | None,
        dtype: torch.dtype | None,
        *,
        has_bias: bool = False,
        factors: str | None = None,
    ) -> None:
        """`bias`: name and shape of the tensor that is added to the scores for the choice, if there
        is one; dtype: of the product. None: that of the model; `has_bias`: the product has one;
        `factors`: name of a tensor that multiplies the experts' weights."""
        super().__init__()
        with unquantized(dtype):
            self.logits = Linear(hidden, num_experts, source, bias=has_bias)
        self._routing, self._bias_source = routing, bias
        self._dtype = dtype or torch.get_default_dtype()
        zeros = torch.zeros(num_experts, dtype=torch.float32)
        self.bias = None if bias is None else parameter(zeros)
        self._factors_name = factors
        self.factors = None if factors is None else parameter(torch.ones_like(zeros))
        self._route = kernels_for(zeros.device).route

    def forward(
        self, x: torch.Tensor, live: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (experts, their weights) of x [n, hidden]: int32 and fp32, [n, num_chosen].

        live: [n], see `AttentionBatch.live`; the experts of padding are -1."""
        logits = self.logits(x.to(self._dtype))
        return self._route(logits, self._routing, self.bias, live, self.factors)

    def slots(self) -> Slots:
        slots: Slots = {}
        if self._bias_source is not None and self.bias is not None:
            name, shape = self._bias_source
            slots[name] = Slot(self.bias.view(shape))
        if self._factors_name is not None and self.factors is not None:
            slots[self._factors_name] = Slot(self.factors)
        return slots


class Experts(nn.Module, abc.ABC):
    """The sum of what each token's experts compute, times their weights.

    Under tensor parallelism a rank has a part of each expert or, if `own` is not full, complete
    experts. Either way it computes a part of a sum over the ranks."""

    def __init__(
        self, hidden: int, size: int, experts: Sequence[Projections], own: Shard, *, bias: bool
    ) -> None:
        """`size`: features of an expert, on all ranks; `own`: the experts of this rank."""
        super().__init__()
        self.hidden, self.size, self.experts, self.own = hidden, size, experts, own
        self._has_bias = bias
        self._packings = {
            source.name: find_packing(source.name)
            for one in experts
            for source in (one.gate, one.up, one.down)
        }

    @abc.abstractmethod
    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x: [n, hidden]; ids, weights: of `Router`, [n, num_chosen]. Returns [n, hidden]."""

    def slots(self) -> Slots:
        """Return slots that read nothing, for the experts of other ranks."""
        inner, outer = (self.size, self.hidden), (self.hidden, self.size)
        elsewhere = self.experts[: self.own.begin], self.experts[self.own.begin + self.own.count :]
        slots: dict[str, Slot | JoinedSlot] = {}
        for one in chain(*elsewhere):
            for source, shape in ((one.gate, inner), (one.up, inner), (one.down, outer)):
                packing = self._packings[source.name]
                if source.stack is None and packing is None:
                    slots[source.tensor("weight")] = JoinedSlot(shape, ())
                elif source.stack is None and packing is not None:
                    kinds = packing.parts(*map(full_shard, shape))
                    slots |= dict.fromkeys(map(source.tensor, kinds), UNREAD)
                if source.stack is None and self._has_bias:
                    slots[source.tensor("bias")] = UNREAD
        return slots


class GatedProduct(nn.Module):
    """A function of gate and up that is no product with an activation."""

    def __init__(
        self, hidden: int, size: int, sources: tuple[Source, Source], *, bias: bool, kind: Gate
    ) -> None:
        super().__init__()
        part = even_shard(size, "features")
        self.product = MergedLinear(hidden, (part, part), sources, bias=bias)
        self._kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.product(x).float().chunk(2, dim=1)
        return reference.gate_by(gate, up, self._kind).to(x.dtype)


class ListedExperts(Experts):
    """Experts that are layers of their own, in any format. Each that is chosen is called."""

    def __init__(
        self,
        hidden: int,
        size: int,
        experts: Sequence[Projections],
        own: Shard,
        activation: Gate,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__(hidden, size, experts, own, bias=bias)

        def gated(one: Projections) -> nn.Module:
            sources = one.gate, one.up
            if isinstance(activation, str):
                return GatedLinear(hidden, size, sources, bias=bias, activation=activation)
            return GatedProduct(hidden, size, sources, bias=bias, kind=activation)

        # Complete experts are not sharded further.
        with nullcontext() if splits_experts() else parallel(SINGLE):
            self.mlps = nn.ModuleList(
                nn.Sequential(gated(one), Linear(size, hidden, one.down, bias=bias, split="in"))
                for one in experts[own.entries]
            )

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        chosen, order = ids.flatten().sort(stable=True)
        tokens, shares = order // ids.shape[1], weights.flatten()[order, None]
        numbers, counts = torch.unique_consecutive(chosen, return_counts=True)
        first = 0
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            part = slice(first, first + count)
            first += count
            expert = number - self.own.begin
            if number >= 0 and 0 <= expert < self.own.count:
                y = self.mlps[expert](x[tokens[part]])
                out.index_add_(0, tokens[part], y.float() * shares[part])
        return out.to(x.dtype)


class StackedExperts(Experts):
    """Experts in one tensor for each projection, which GPU kernels multiply at once."""

    def __init__(
        self,
        hidden: int,
        size: Shard,
        experts: Sequence[Projections],
        own: Shard,
        activation: Gate,
        kernels: TritonKernels,
        *,
        bias: bool = False,
    ) -> None:
        """`size`: this rank's features of an expert."""
        super().__init__(hidden, size.total, experts, own, bias=bias)
        self._features = size
        self._is_interleaved = all(one.gate.is_every_second_row for one in experts)
        both = [self._packings[part.name] for one in experts for part in (one.gate, one.up)]
        down = [self._packings[one.down.name] for one in experts]
        self.up = new_stack(own.count, (size.count, size.count), hidden, both)
        self.down = new_stack(own.count, (hidden,), size.count, down)
        self.up_bias = self.down_bias = None
        if bias:
            self.up_bias, self.down_bias = (
                parameter(torch.zeros(own.count, rows)) for rows in (2 * size.count, hidden)
            )
        # Of a sum over ranks, only the first one adds the bias.
        adds_bias = size.is_full or current_group().rank == 0
        self._layer = kernels.layer_of_experts(
            self.up.stack(own.count)._replace(bias=self.up_bias),
            self.down.stack(own.count)._replace(bias=self.down_bias if adds_bias else None),
            activation,
            self._is_interleaved,
        )

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if not self.own.is_full:
            own = ids - self.own.begin
            ids = torch.where((own >= 0) & (own < self.own.count), own, -1)
        return self._layer(x, ids, weights)

    def arrange(self) -> None:
        """Put the weights in the order of the kernels, in place. Called once, after loading."""
        for weight in (self.up, self.down):
            weight.arrange_stack(self.own.count)

    def slots(self) -> Slots:
        joined: dict[str, list[Slot | JoinedSlot]] = {}
        for index, one in enumerate(self.experts[self.own.entries]):
            for source, parts in self._slots_of(index, one):
                for kind, slot in parts.items():
                    found = slot if source.stack is None else StackedSlot.of(slot, source.stack)
                    joined.setdefault(source.tensor(kind), []).append(found)
        return super().slots() | {name: joined_slot(slots) for name, slots in joined.items()}

    def _slots_of(
        self, index: int, one: Projections
    ) -> Iterator[tuple[Source, dict[str, Slot | JoinedSlot]]]:
        """Yield (source, slots by the ends of their tensors' names) of one of this rank's."""
        size, hidden = self._features, full_shard(self.hidden)
        gate, down = 2 * index * size.count, index * hidden.count
        if self._is_interleaved:  # as in the checkpoint
            both = Shard(2 * size.total, 2 * size.begin, 2 * size.count)
            yield one.gate, self._slots(one.gate, self.up, self.up_bias, gate, (both, hidden))
        else:
            for nth, source in enumerate((one.gate, one.up)):
                rows = size
                if source.order is not None:
                    first = source.order.rows[0] + size.begin
                    rows = Shard(source.order.total, first, size.count)
                first = gate + nth * size.count
                yield source, self._slots(source, self.up, self.up_bias, first, (rows, hidden))
        yield one.down, self._slots(one.down, self.down, self.down_bias, down, (hidden, size))

    def _slots(
        self,
        source: Source,
        weight: StackableWeight,
        bias: nn.Parameter | None,
        first: int,
        shards: tuple[Shard, Shard],
    ) -> dict[str, Slot | JoinedSlot]:
        """Return the slots of a projection, whose first row in a stack is `first`."""
        rows, packing = slice(first, first + shards[0].count), self._packings[source.name]
        slots: dict[str, Slot | JoinedSlot] = {}
        if packing is None or weight.holds(packing):
            slots |= weight.part_slots(rows, shards, transpose=source.transpose)
        else:
            slots |= packed_slots(weight, source.name, packing, rows, shards)
        if bias is not None:
            slots["bias"] = Slot(bias.view(-1)[rows], shards=shards[:1])
        return slots
