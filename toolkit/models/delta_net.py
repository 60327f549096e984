"""Gated delta nets: linear attention whose state forgets, and replaces what a key stood for."""

from typing import Any

import torch
import torch.nn.functional as F

from toolkit.distributed import current_group, even_shard, full_shard
from toolkit.kernels.cpu import recurrent
from toolkit.kernels.recurrent import Sequences, gated_delta_rule, gated_norm, short_convolution
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
        """Return windows, [num_slots, width - 1, channels], and states, [..., k_size, v_size]."""
        windows, states = tensors
        net, slots = self.net, len(windows)
        return (
            windows.view(slots, net.width - 1, -1),
            states.view(slots, self.num_v_heads, net.k_size, net.v_size),
        )

    def gpu_layer(self, kernels: TritonKernels) -> GPULayer:
        return kernels.delta_net(*self._tensors)

    def cpu_layer(self) -> CPULayer:
        return recurrent.DeltaNet(*self._tensors)

    @property
    def _tensors(self) -> tuple[Any, ...]:
        """What kernels take, in their order."""
        net = self.net
        weights = self.kernel, self.a_log, self.dt_bias, self.norm_weight, net.eps, net.rate
        return *weights, *self.states, self.num_k_heads

    def compute(self, y: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        """Return [num_tokens, v_heads · v_size]. y: [num_tokens, q | k | v | z | b | a]."""
        net, (windows, states) = self.net, self.states
        widths = [sum(self._widths[:3]), *self._widths[3:]]
        qkv, z, b, a = torch.split(y, widths, dim=1)
        qkv = short_convolution(qkv, self.kernel, windows, sequences)
        q, k, v = torch.split(qkv, self._widths[:3], dim=1)
        decay = -self.a_log.exp() * F.softplus(a.float() + self.dt_bias)
        out = gated_delta_rule(
            q.reshape(-1, self.num_k_heads, net.k_size),
            k.reshape(-1, self.num_k_heads, net.k_size),
            v.reshape(-1, self.num_v_heads, net.v_size),
            decay,
            net.rate * b.float().sigmoid(),
            states,
            sequences,
        )
        gated_norm(out, z.reshape(out.shape), self.norm_weight, net.eps)
        return out.flatten(1)

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
