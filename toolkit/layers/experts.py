"""Experts: gated MLPs, a few of which are chosen for each token (Shazeer et al., 2017)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

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
from toolkit.weights.weight import Weight, parameter


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


class Experts(nn.Module):
    """The sum of what each token's experts compute, times their weights.

    Under tensor parallelism a rank has a part of each expert or, if `own` is not full, complete
    experts. Either way it computes a part of a sum over the ranks."""

    own: Shard  # of the experts

    def slots(self) -> Slots:
        raise NotImplementedError

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x: [n, hidden]; ids, weights: of `Router`, [n, num_chosen]. Returns [n, hidden]."""
        raise NotImplementedError


class ListedExperts(Experts):
    """Experts that are layers of their own, in any format. Each that is chosen is called."""

    def __init__(
        self,
        hidden: int,
        size: int,
        experts: Sequence[Projections],
        activation: str,
        own: Shard,
    ) -> None:
        super().__init__()
        self.own = own
        self._elsewhere = [*experts[: own.begin], *experts[own.begin + own.count :]]
        self._shapes = (size, hidden), (hidden, size)
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
        num_chosen = ids.shape[1]
        chosen, order = ids.flatten().sort(stable=True)
        tokens, shares = order // num_chosen, weights.flatten()[order, None]
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

    def slots(self) -> Slots:
        """Return slots that read nothing, for the experts of other ranks."""
        inner, outer = self._shapes
        return {
            f"{source.name}.weight": JoinedSlot(shape, ())
            for one in self._elsewhere
            for source, shape in ((one.gate, inner), (one.up, inner), (one.down, outer))
        }


class StackedExperts(Experts):
    """Experts in one tensor for each projection, which GPU kernels multiply at once."""

    def __init__(
        self,
        hidden: int,
        size: Shard,
        experts: Sequence[Projections],
        activation: str,
        own: Shard,
        kernels: Kernels,
    ) -> None:
        """`size`: this rank's features of an expert."""
        super().__init__()
        self.own, self._experts, self._activation = own, experts, activation
        self._hidden, self._size, self._kernels = hidden, size, kernels
        self.up: Weight = new_weight(own.count * 2 * size.count, hidden)
        self.down: Weight = new_weight(own.count * hidden, size.count)
        problem = None
        if any(find_packing(one.gate.name) for one in experts):
            problem = "this checkpoint's experts are quantized"
        elif not isinstance(self.up, PlainWeight | FP8Weight):
            problem = "--quantization other than fp8"
        if problem:
            raise ConfigError(
                f"Models with experts run on GPUs in bfloat16, float16, float32 and FP8 "
                f"(--quantization fp8); {problem} is not supported there."
            )

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if not self.own.is_full:
            own = ids - self.own.begin
            ids = torch.where((own >= 0) & (own < self.own.count), own, -1)
        count, size, hidden = self.own.count, self._size.count, self._hidden
        up, down = self.up, self.down
        assert isinstance(up, PlainWeight | FP8Weight)
        assert isinstance(down, PlainWeight | FP8Weight)
        up_scale = down_scale = None
        if isinstance(up, FP8Weight) and isinstance(down, FP8Weight):
            up_scale = up.scales.view(count, 2 * size)
            down_scale = down.scales.view(count, hidden)
        return self._kernels.experts(
            x,
            ids,
            weights,
            up.values.view(count, 2 * size, hidden),
            down.values.view(count, hidden, size),
            self._activation,
            up_scale,
            down_scale,
        )

    def slots(self) -> Slots:
        slots: Slots = {}
        size, hidden = self._size, full_shard(self._hidden)
        for index, one in enumerate(self._experts):
            expert = index - self.own.begin
            if not 0 <= expert < self.own.count:
                for source, shape in (
                    (one.gate, (size.total, hidden.total)),
                    (one.up, (size.total, hidden.total)),
                    (one.down, (hidden.total, size.total)),
                ):
                    slots[f"{source.name}.weight"] = JoinedSlot(shape, ())
                continue
            gate = 2 * expert * size.count
            down = expert * hidden.count
            for source, weight, first, shards in (
                (one.gate, self.up, gate, (size, hidden)),
                (one.up, self.up, gate + size.count, (size, hidden)),
                (one.down, self.down, down, (hidden, size)),
            ):
                rows = slice(first, first + shards[0].count)
                part = weight.part_slots(rows, shards, transpose=source.transpose)
                slots |= {f"{source.name}.{kind}": slot for kind, slot in part.items()}
        return slots
