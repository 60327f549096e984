"""Gated delta nets: linear attention whose state forgets, and replaces what a key stood for."""

from typing import Any

import torch

from toolkit.distributed import current_group, even_shard, full_shard
from toolkit.kernels.cpu import recurrent
from toolkit.kernels.recurrent import Span, delta_net
from toolkit.kernels.table import TritonKernels
from toolkit.layers import Linear, MergedLinear
from toolkit.models import describe
from toolkit.models.memory import RowMemory
from toolkit.models.recurrent import CPULayer, GPULayer, RecurrentMix
from toolkit.weights.slots import JoinedSlot, Slot, Slots, joined_slot
from toolkit.weights.weight import parameter


class DeltaNetMix(RecurrentMix):
    """A gated delta net. Its queries, keys, values, gates and rates are one product."""

    def __init__(self, net: describe.DeltaNet, hidden: int, _: object) -> None:
        super().__init__()
        self.net = net
        heads = even_shard(net.num_k_heads, "heads of a delta net")
        v_heads = heads.times(net.group)
        self.num_k_heads, self.num_v_heads = heads.count, v_heads.count
        keys, values = heads.times(net.k_size), v_heads.times(net.v_size)
        shards = [keys, keys, values, values, v_heads, v_heads]
        sources = [net.q, net.k, net.v, net.z, net.b, net.a]
        self.input = MergedLinear(hidden, shards, sources, bias=False)
        self.output = Linear(net.values, hidden, net.out, bias=False, split="in")
        ranks = current_group().size
        self.memory = RowMemory(tuple(part.on_rank(ranks) for part in net.memory.parts))
        self._widths = [shard.count for shard in shards]
        self._channels = keys, keys, values
        channels = sum(self._widths[:3])
        self.kernel = parameter(torch.zeros(channels, net.width))
        self.norm_weight = parameter(torch.ones(net.v_size))
        self.a_log, self.dt_bias = (
            parameter(torch.zeros(v_heads.count, dtype=torch.float32)) for _ in range(2)
        )
        self._v_heads = v_heads

    def shape_states(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return inputs, [num_slots, rows, columns], and states, [..., k_size, v_size]."""
        inputs, states = tensors
        net, slots = self.net, len(inputs)
        columns = len(self.kernel) + 2 * self.num_v_heads
        return (
            inputs.view(slots, -1, columns),
            states.view(slots, self.num_v_heads, net.k_size, net.v_size),
        )

    def gpu_layer(self, kernels: TritonKernels) -> GPULayer:
        return kernels.delta_net(*self._tensors)

    def cpu_layer(self) -> CPULayer:
        return recurrent.DeltaNet(*self._tensors)

    def compute(self, y: torch.Tensor, spans: list[Span]) -> torch.Tensor:
        """Return [num_tokens, v_heads · v_size]. y: [num_tokens, q | k | v | z | b | a]."""
        return delta_net(y, *self._tensors, spans)  # type: ignore[call-arg]

    @property
    def _tensors(self) -> tuple[Any, ...]:
        """The arguments of `kernels.recurrent.delta_net` between the first and the last."""
        net = self.net
        weights = self.kernel, self.a_log, self.dt_bias, self.norm_weight, net.eps, net.rate
        return *weights, *self.states, self.num_k_heads

    @property
    def kind(self) -> tuple[object, ...]:
        return (self.net.group, self.net.width, self.net.rate, *super().kind)

    def _kernel_slots(self) -> Slots:
        parts = torch.split(self.kernel[:, None], [shard.count for shard in self._channels])
        names = [f"{name}.weight" for name in self.net.convolutions]
        if len(names) > 1:
            slots = zip(names, parts, self._channels, strict=True)
            return {name: Slot(part, shards=(shard,)) for name, part, shard in slots}
        kernel: list[Slot | JoinedSlot] = []
        all_rows, total = full_shard(sum(shard.total for shard in self._channels)), 0
        for part, shard in zip(parts, self._channels, strict=True):
            order = range(total + shard.begin, total + shard.begin + shard.count)
            kernel.append(Slot(part, shards=(all_rows,), order=tuple(order)))
            total += shard.total
        return {names[0]: joined_slot(kernel)}

    def slots(self) -> Slots:
        shards = (self._v_heads,)
        return {
            **self._kernel_slots(),
            self.net.decay: Slot(self.a_log, shards=shards),
            self.net.time: Slot(self.dt_bias, shards=shards),
            f"{self.net.norm}.weight": Slot(self.norm_weight),
        }
