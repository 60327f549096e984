"""Gated delta nets: linear attention whose state forgets, and replaces what a key stood for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from toolkit.attention import AttentionBatch
from toolkit.distributed import current_group, even_shard, full_shard
from toolkit.kernels.cpu import recurrent
from toolkit.kernels.recurrent import Sequences, gated_delta_rule, gated_norm, short_convolution
from toolkit.kernels.table import TritonKernels, kernels_for
from toolkit.layers import Linear, MergedLinear
from toolkit.models import describe
from toolkit.models.memory import RowMemory
from toolkit.models.mix import Mix
from toolkit.models.model import Keeper
from toolkit.weights.quantization import target_device
from toolkit.weights.slots import JoinedSlot, Slot, Slots, joined_slot
from toolkit.weights.weight import parameter

if TYPE_CHECKING:
    from toolkit.kernels.triton.products.matmul import Unscaled
    from toolkit.kernels.triton.recurrent.step import RecurrentStep


def sequences_of(batch: AttentionBatch) -> Sequences:
    """Return the tokens and states of a step's requests."""
    if "sequences" not in batch.plan:
        states = batch.states
        assert states is not None
        is_prompt = batch.max_query_len > 1
        batch.plan["sequences"] = Sequences(
            batch.query_start_loc.tolist() if is_prompt else None,
            states.reads,
            states.writes,
            batch.is_first,
            states.keeps,
            states.after.tolist() if is_prompt else [],
        )
    found: Sequences = batch.plan["sequences"]
    return found


def gpu_step_of(batch: AttentionBatch, kernels: TritonKernels) -> RecurrentStep:
    """Return a step's requests, as GPU kernels take them."""
    if "recurrent" not in batch.plan:
        assert batch.states is not None
        batch.plan["recurrent"] = kernels.recurrent_step(
            batch.query_start_loc,
            batch.seq_lens,
            len(batch.positions),
            batch.max_query_len,
            *batch.states.tensors,
        )
    found: RecurrentStep = batch.plan["recurrent"]
    return found


def cpu_step_of(batch: AttentionBatch) -> recurrent.RecurrentStep:
    """Return a step's requests, as CPU kernels take them."""
    if "recurrent" not in batch.plan:
        assert batch.states is not None
        batch.plan["recurrent"] = recurrent.RecurrentStep(
            batch.query_start_loc, batch.seq_lens, *batch.states.tensors
        )
    found: recurrent.RecurrentStep = batch.plan["recurrent"]
    return found


class DeltaNetMix(Mix, Keeper):
    """A gated delta net. Its queries, keys, values, gates and rates are one product."""

    input: MergedLinear
    output: Linear
    attends = True

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
        self.windows: torch.Tensor | None = None
        kernels = kernels_for(target_device())
        self._gpu = kernels if isinstance(kernels, TritonKernels) else None
        self.may_synchronize = self._gpu is None
        self._is_loaded = False
        self._layer: Callable[[torch.Tensor, AttentionBatch], torch.Tensor] = self._compute

    def bind(self, *tensors: torch.Tensor) -> None:
        """`tensors`: windows and states, [num_slots, heads, size] each."""
        windows, states = tensors
        net, slots = self.net, len(windows)
        self.windows = windows.view(slots, net.width - 1, -1)
        self.states = states.view(slots, self.num_v_heads, net.k_size, net.v_size)
        self._prepare()

    def pack(self) -> None:
        """Prepare the kernels, if there are any. Called once, after loading."""
        self._is_loaded = True
        self._prepare()

    def _prepare(self) -> None:
        """Make the kernels once weights and states are there."""
        if not self._is_loaded or self.windows is None:
            return
        numbers = self.net.eps, self.net.rate
        weights = self.kernel, self.a_log, self.dt_bias, self.norm_weight, *numbers
        places = self.windows, self.states, self.num_k_heads
        if (kernels := self._gpu) is not None:
            on_gpu = kernels.delta_net(*weights, *places)
            self._layer = lambda y, batch: on_gpu(y, gpu_step_of(batch, kernels))
        elif recurrent.supports(self.windows, self.states):
            on_cpu = recurrent.DeltaNet(*weights, *places)
            self._layer = lambda y, batch: on_cpu(y, cpu_step_of(batch))

    def forward(self, x: torch.Tensor | Unscaled, batch: AttentionBatch) -> torch.Tensor:
        """Return the input of `output`, [num_tokens, v_heads · v_size]."""
        return self._layer(self.input(x), batch)

    def _compute(self, y: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Compute all but the products in PyTorch. y: [num_tokens, q | k | v | z | b | a]."""
        net, sequences = self.net, sequences_of(batch)
        widths = [sum(self._widths[:3]), *self._widths[3:]]
        qkv, z, b, a = torch.split(y, widths, dim=1)
        assert self.windows is not None
        qkv = short_convolution(qkv, self.kernel, self.windows, sequences)
        q, k, v = torch.split(qkv, self._widths[:3], dim=1)
        decay = -self.a_log.exp() * F.softplus(a.float() + self.dt_bias)
        out = gated_delta_rule(
            q.reshape(-1, self.num_k_heads, net.k_size),
            k.reshape(-1, self.num_k_heads, net.k_size),
            v.reshape(-1, self.num_v_heads, net.v_size),
            decay,
            self.net.rate * b.float().sigmoid(),
            self.states,
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
