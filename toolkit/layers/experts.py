"""Experts: gated MLPs, a few of which are chosen for each token (Shazeer et al., 2017)."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn

from toolkit.distributed import SINGLE, Shard, full_shard, parallel, splits_experts
from toolkit.errors import ConfigError
from toolkit.kernels import reference
from toolkit.kernels.reference import Routing
from toolkit.kernels.table import Kernels, kernels_for
from toolkit.layers.linear import GatedLinear, Linear
from toolkit.weights.fp8 import FP8Weight
from toolkit.weights.plain import PlainWeight
from toolkit.weights.quantization import find_packing, new_weight, unquantized
from toolkit.weights.slots import JoinedSlot, Slot, Slots
from toolkit.weights.source import Source
from toolkit.weights.weight import parameter


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
    ) -> None:
        """`bias`: name and shape of the tensor that is added to the scores for the choice, if there
        is one; dtype: of the product. None: that of the model."""
        super().__init__()
        with unquantized(dtype):
            self.logits = Linear(hidden, num_experts, source, bias=False)
        self._routing, self._bias_source = routing, bias
        self._dtype = dtype or torch.get_default_dtype()
        zeros = torch.zeros(num_experts, dtype=torch.float32)
        self.bias = None if bias is None else parameter(zeros)
        kernels = kernels_for(zeros.device)
        self._route = reference.route if kernels is None else kernels.route

    def forward(self, x: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (experts, their weights) of x [n, hidden]: int32 and fp32, [n, num_chosen].

        slots: cache slots [n]; tokens with a negative one are padding, with experts -1."""
        return self._route(self.logits(x.to(self._dtype)), self._routing, self.bias, slots)

    def slots(self) -> Slots:
        if self._bias_source is None or self.bias is None:
            return {}
        name, shape = self._bias_source
        return {name: Slot(self.bias.view(shape))}


class Experts(nn.Module, abc.ABC):
    """The sum of what each token's experts compute, times their weights.

    Under tensor parallelism a rank has a part of each expert or, if `own` is not full, complete
    experts. Either way it computes a part of a sum over the ranks."""

    def __init__(self, hidden: int, size: int, experts: Sequence[Projections], own: Shard) -> None:
        """`size`: features of an expert, on all ranks; `own`: the experts of this rank."""
        super().__init__()
        self.hidden, self.size, self.experts, self.own = hidden, size, experts, own

    @abc.abstractmethod
    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x: [n, hidden]; ids, weights: of `Router`, [n, num_chosen]. Returns [n, hidden]."""

    def slots(self) -> Slots:
        """Return slots that read nothing, for the experts of other ranks."""
        inner, outer = (self.size, self.hidden), (self.hidden, self.size)
        elsewhere = self.experts[: self.own.begin], self.experts[self.own.begin + self.own.count :]
        return {
            f"{source.name}.weight": JoinedSlot(shape, ())
            for one in chain(*elsewhere)
            for source, shape in ((one.gate, inner), (one.up, inner), (one.down, outer))
        }


class ListedExperts(Experts):
    """Experts that are layers of their own, in any format. Each that is chosen is called."""

    def __init__(
        self, hidden: int, size: int, experts: Sequence[Projections], own: Shard, activation: str
    ) -> None:
        super().__init__(hidden, size, experts, own)
        # Complete experts are not sharded further.
        with nullcontext() if splits_experts() else parallel(SINGLE):
            self.mlps = nn.ModuleList(
                nn.Sequential(
                    GatedLinear(
                        hidden, size, (one.gate, one.up), bias=False, activation=activation
                    ),
                    Linear(size, hidden, one.down, bias=False, split="in"),
                )
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
        activation: str,
        kernels: Kernels,
    ) -> None:
        """`size`: this rank's features of an expert."""
        super().__init__(hidden, size.total, experts, own)
        self._activation, self._kernels, self._features = activation, kernels, size
        self.up = self._weight(2 * size.count, hidden)
        self.down = self._weight(hidden, size.count)
        self._up, self._up_scale = self._stack(self.up)
        self._down, self._down_scale = self._stack(self.down)

    def _weight(self, rows: int, columns: int) -> PlainWeight | FP8Weight:
        """Return a weight with so many rows of each expert. Raises ConfigError for other kinds."""
        weight = new_weight(self.own.count * rows, columns)
        is_packed = any(find_packing(one.gate.name) for one in self.experts)
        if isinstance(weight, PlainWeight | FP8Weight) and not is_packed:
            return weight
        raise ConfigError(
            f"Models with experts run on GPUs in bfloat16, float16, float32 and FP8 "
            f"(--quantization fp8), "
            f"{'not from quantized checkpoints' if is_packed else 'not in other quantizations'}."
        )

    def _stack(self, weight: PlainWeight | FP8Weight) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (values [experts, rows, columns], scales [experts, rows] of FP8) of a weight."""
        scales = weight.scales if isinstance(weight, FP8Weight) else None
        count = self.own.count
        return (
            weight.values.view(count, -1, weight.shape[1]),
            None if scales is None else scales.view(count, -1),
        )

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if not self.own.is_full:
            own = ids - self.own.begin
            ids = torch.where((own >= 0) & (own < self.own.count), own, -1)
        return self._kernels.experts(
            x,
            ids,
            weights,
            self._up,
            self._down,
            self._activation,
            self._up_scale,
            self._down_scale,
        )

    def slots(self) -> Slots:
        slots = super().slots()
        size, hidden = self._features, full_shard(self.hidden)
        for index, one in enumerate(self.experts[self.own.entries]):
            gate, down = 2 * index * size.count, index * hidden.count
            for source, weight, first, shards in (
                (one.gate, self.up, gate, (size, hidden)),
                (one.up, self.up, gate + size.count, (size, hidden)),
                (one.down, self.down, down, (hidden, size)),
            ):
                rows = slice(first, first + shards[0].count)
                part = weight.part_slots(rows, shards, transpose=source.transpose)
                slots |= {f"{source.name}.{kind}": slot for kind, slot in part.items()}
        return slots
