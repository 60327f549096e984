"""Attention, MLPs and experts: a layer's branches between its norms and the residual stream."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from toolkit.attention import (
    AttentionBatch,
    AttentionShape,
    HeadNorm,
    HeadTransform,
    SharedAttention,
)
from toolkit.distributed import Shard, current_group, even_shard, expert_shards, kv_head_shard
from toolkit.errors import CheckpointError
from toolkit.kernels import cpu
from toolkit.kernels.cpu import recurrent
from toolkit.kernels.cpu.norm import DTYPES, RowNorm
from toolkit.kernels.reference import Routing
from toolkit.kernels.table import TritonKernels, kernels_for
from toolkit.layers import (
    Experts,
    GatedLinear,
    Linear,
    ListedExperts,
    MergedLinear,
    Projections,
    Router,
    StackedExperts,
)
from toolkit.layers.norm import norm_over_ranks
from toolkit.models import describe
from toolkit.models.model import PagedAttention
from toolkit.models.rotary import RotaryTables
from toolkit.weights.activation import activation_kind, gate_kind
from toolkit.weights.kinds.plain import GPUWeight
from toolkit.weights.quantization import target_device, unquantized
from toolkit.weights.slots import JoinedSlot, Slot, Slots
from toolkit.weights.weight import parameter

if TYPE_CHECKING:
    from toolkit.weights.weight import Rows


class Mix(nn.Module):
    """A branch without its norms. `input` and `output` are its first and its last product.

    `forward` computes all but the last, which the residual stream adds. Without `input`, several
    products read what the branch reads; without `output`, `forward` computes all of the branch."""

    input: Linear | None
    output: Linear | None
    may_synchronize: bool = False  # it may wait for the device: no CUDA graphs

    def __init__(self) -> None:
        super().__init__()
        self.input = self.output = None

    @property
    def kind(self) -> tuple[object, ...]:
        """A value that is equal for mixes that launch the same kernels."""
        return (type(self), *((p.shape, p.dtype) for p in self.parameters()))


class AttentionMix(Mix):
    """Attention. Queries, keys, values and the gate are one product."""

    input: MergedLinear
    output: Linear

    def __init__(
        self, attention: describe.Attention, hidden: int, rotary: RotaryTables, num_inputs: int = 1
    ) -> None:
        """`num_inputs`: hidden states that are one input, one after the other."""
        super().__init__()
        rope, q_rope = rotary.indices(attention.rope)
        size = attention.head_size
        self.heads = even_shard(attention.num_heads, "attention heads")
        self.kv_heads = kv_head_shard(attention.num_kv_heads)
        shards, sources = [self.heads.times(size)], [attention.q]
        for source in (attention.k, attention.v):
            if source is not None:
                shards.append(self.kv_heads.times(size))
                sources.append(source)
        self._qkv_size, self._is_gated = sum(one.count for one in shards), False
        if attention.gate is not None:
            self._is_gated = True
            shards.append(shards[0])
            sources.append(attention.gate)
        self.input = MergedLinear(num_inputs * hidden, shards, sources, bias=attention.bias)
        self.norm = None if attention.norm is None else QKNorm(attention, self.heads, self.kv_heads)
        self._sinks_name, self.sinks = attention.sinks, None
        if attention.sinks is not None:
            self.sinks = parameter(torch.zeros(self.heads.count, dtype=torch.float32))
        kind = PagedAttention if attention.shares is None else SharedAttention
        self.attn = kind(
            AttentionShape(
                self.heads.count,
                self.kv_heads.count,
                size,
                attention.scale,
                sliding_window=attention.window,
                chunk=attention.chunk,
                soft_cap=attention.soft_cap,
                sinks=self.sinks,
            ),
            HeadTransform(
                rope=rope,
                q_rope=q_rope,
                norm=None if self.norm is None else self.norm.by_head,
                clip=attention.clip,
            ),
        )
        self.output = Linear(
            attention.width, hidden, attention.out, bias=attention.out_bias, split="in"
        )

    def read(self, source: AttentionMix) -> None:
        """Set the attention whose keys and values this one reads."""
        assert isinstance(self.attn, SharedAttention)
        assert isinstance(source.attn, PagedAttention)
        self.attn.read(source.attn)

    def forward(self, x: Rows, batch: AttentionBatch) -> torch.Tensor:
        """Return the input of `output`, [num_tokens, heads · head_size]."""
        qkv: torch.Tensor = self.input(x)
        gate: torch.Tensor | None = None
        if self._is_gated:
            qkv, gate = qkv[:, : self._qkv_size], qkv[:, self._qkv_size :]
            if not self.attn.backend.takes_slices:
                qkv = qkv.contiguous()
        if self.norm is not None:
            self.norm(qkv)
        out: torch.Tensor = self.attn(qkv, batch)
        if gate is None:
            return out
        if isinstance(kernels := kernels_for(out.device), TritonKernels):
            kernels.gate_rows(out, gate)
        elif not out.is_cuda and cpu.available() and out.dtype in recurrent.DTYPES:
            recurrent.gate_rows(out, gate)
        else:
            out *= gate.sigmoid()
        return out

    @property
    def kind(self) -> tuple[object, ...]:
        attn = self.attn
        ropes = attn.transform.rope, attn.transform.q_rope
        return (type(attn), attn.shape, *(one is not None for one in ropes), *super().kind)

    def slots(self) -> Slots:
        if self._sinks_name is None or self.sinks is None:
            return {}
        return {self._sinks_name: Slot(self.sinks, shards=(self.heads,))}


class QKNorm(nn.Module):
    """Norm of queries and keys. Attention computes it, unless it spans all heads (OLMo 2)."""

    def __init__(self, attention: describe.Attention, heads: Shard, kv_heads: Shard) -> None:
        super().__init__()
        assert attention.norm is not None
        self.norm, self.size = attention.norm, attention.head_size
        self.group, is_shared = current_group(), self.norm.span == "head"
        self.dtype = torch.get_default_dtype()
        self._packed: list[RowNorm] = []
        dtype = torch.float32 if self.norm.offset else None

        def weight(shard: Shard) -> nn.Parameter:
            count = 1 if is_shared else shard.count
            ones = torch.ones(count, self.size, dtype=dtype)
            return nn.Parameter(ones, requires_grad=False)

        self.q_weight = weight(heads)
        self.k_weight = None if attention.k is None else weight(kv_heads)
        self._parts = [(self.norm.q, self.q_weight, heads)]
        if self.k_weight is not None:
            self._parts.append((self.norm.k, self.k_weight, kv_heads))

    @property
    def by_head(self) -> HeadNorm | None:
        """The norm that attention computes."""
        norm = self.norm
        if norm.span == "all":
            return None
        return HeadNorm(
            self.q_weight,
            self.q_weight[:1] if self.k_weight is None else self.k_weight,
            norm.eps,
            is_centered=norm.is_centered,
            is_last=norm.is_last,
            norms_values=norm.norms_values,
        )

    def forward(self, qkv: torch.Tensor) -> None:
        """Norm queries and keys over all heads, in place. qkv: [num_tokens, q | k | v]."""
        if self.norm.span != "all":
            return
        begin = 0
        for index, (_, weight, _) in enumerate(self._parts):
            rows = qkv[:, begin : begin + weight.numel()]
            begin += weight.numel()
            if self._packed:
                self._packed[index](rows)
            else:
                norm_over_ranks(rows, weight.view(-1), self.norm.eps, self.group)

    def pack(self) -> None:
        """Prepare the CPU kernels, if there are any. Called once, after loading."""
        fits = cpu.available() and self.dtype in DTYPES and self.group.size == 1
        if fits and self.norm.span == "all":
            self._packed = [RowNorm(one.view(-1), self.norm.eps) for _, one, _ in self._parts]

    def slots(self) -> Slots:
        slots: Slots = {}
        for name, weight, shard in self._parts:
            if name is None:
                continue
            tensors = describe.head_norm_tensors(name, self.norm.span, shard.total, self.size)
            for index, (tensor, shape) in enumerate(tensors):
                shards: tuple[Shard | None, ...] = ()
                part = weight[0]
                if self.norm.span == "all":
                    part, shards = weight.view(-1), (shard.times(self.size),)
                elif len(shape) == 2:
                    part, shards = weight, (shard,)
                elif self.norm.span == "own":
                    if not shard.begin <= index < shard.begin + shard.count:
                        slots[tensor] = JoinedSlot(shape, ())  # another rank's
                        continue
                    part = weight[index - shard.begin]
                slots[tensor] = Slot(
                    part, shards=shards, entries=self.norm.order, offset=self.norm.offset
                )
        return slots


class MLPMix(Mix):
    """An MLP. Gate and up are one product."""

    input: Linear
    output: Linear

    def __init__(self, mlp: describe.MLP, hidden: int, rotary: RotaryTables | None = None) -> None:
        super().__init__()
        kind = activation_kind(mlp.activation)
        if mlp.gate is None:
            self.input = Linear(
                hidden, mlp.size, mlp.up, bias=mlp.bias, activation=kind, split="out"
            )
        else:
            self.input = GatedLinear(
                hidden, mlp.size, (mlp.gate, mlp.up), bias=mlp.bias, activation=kind
            )
        self.output = Linear(mlp.size, hidden, mlp.down, bias=mlp.bias, split="in")

    def forward(self, x: Rows, _batch: AttentionBatch) -> Rows:
        """Return the input of `output`."""
        return self.input.product_for(self.output, x)


class ExpertsMix(Mix):
    """Experts, and an MLP that computes every token, if there is one."""

    def __init__(
        self, experts: describe.Experts, hidden: int, rotary: RotaryTables | None = None
    ) -> None:
        super().__init__()
        routing = Routing(
            experts.num_chosen,
            experts.scores,
            experts.renormalizes,
            experts.num_groups,
            experts.num_chosen_groups,
            experts.scale,
        )
        bias = experts.correction
        self.router = Router(
            hidden,
            experts.num_experts,
            experts.router,
            routing,
            None if bias is None else (bias.name, bias.shape),
            torch.float32 if experts.routes_in_float32 else None,
            has_bias=experts.bias,
            factors=experts.factors,
        )
        sources = [Projections(*experts.expert(i)) for i in range(experts.num_experts)]
        own, size = expert_shards(experts.num_experts, experts.size)
        kernels = kernels_for(target_device())
        gate = gate_kind(experts.activation)
        if isinstance(kernels, TritonKernels):
            self.experts: Experts = StackedExperts(
                hidden, size, sources, own, gate, kernels, bias=experts.bias
            )
        else:
            self.experts = ListedExperts(
                hidden, experts.size, sources, own, gate, bias=experts.bias
            )
        self._weighs_inputs = experts.weighs_inputs
        self.shared = None if experts.shared is None else MLPMix(experts.shared, hidden)
        self.shared_gate = None
        if experts.shared_gate is not None:
            with unquantized():
                self.shared_gate = Linear(hidden, 1, experts.shared_gate, bias=False)

    def forward(self, x: Rows, batch: AttentionBatch) -> torch.Tensor:
        """Return the sum of the experts, [num_tokens, hidden]."""
        assert isinstance(x, torch.Tensor), "without `input`, rows are complete"
        y = self.sum(x, x, batch)
        if self.shared is not None:
            shared = self.shared.output(self.shared(x, batch))
            if self.shared_gate is None:
                y = y + shared
            elif isinstance(weight := self.shared_gate.weight, GPUWeight):  # without adapters
                weight.kernels.add_gated(y, shared, x, weight.values)
            else:
                y = y + shared * self.shared_gate(x).sigmoid()
        return y

    def sum(self, x: torch.Tensor, routed: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Return the sum of the experts alone. routed: what the router reads, like x."""
        live = None if batch.live is None else rows_of(batch.live, x, batch)
        ids, weights = self.router(routed, live)
        y: torch.Tensor
        if not self._weighs_inputs:
            y = self.experts(x, ids, weights)
            return y
        rows = (x[:, None] * weights[..., None].to(x.dtype)).flatten(0, 1)
        y = self.experts(rows, ids.view(-1, 1), torch.ones_like(weights).view(-1, 1))
        return y.view(*ids.shape, -1).sum(1) if ids.shape[1] > 1 else y


def rows_of(rows: torch.Tensor, x: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
    """Return the rows of the tokens in x, of the rows of all tokens or of those in x."""
    if len(rows) == len(x):
        return rows
    assert batch.wanted is not None, "only the wanted tokens are left"
    return rows[batch.wanted]


MODULES: dict[type[describe.Mix], Callable[[Any, int, RotaryTables], Mix]] = {
    describe.Attention: AttentionMix,
    describe.MLP: MLPMix,
    describe.Experts: ExpertsMix,
}
"""Module of each description: made of it, the hidden size and the rotations."""


def build_mix(described: describe.Mix, hidden: int, rotary: RotaryTables) -> Mix:
    """Return the module of a description. Raises CheckpointError if there is none."""
    make = MODULES.get(type(described)) or find_module(described)
    mix: Mix = make(described, hidden, rotary)
    return mix


def find_module(described: describe.Mix | describe.FeatureEncoder) -> Callable[..., Any]:
    """Return the class of a description's module. Raises CheckpointError if there is none."""
    kind, (module, _, name) = type(described).__name__, described.module.partition(":")
    if not module or not name:
        raise CheckpointError(
            f"{kind} has no module: its field `module` must be 'package.module:class'; "
            f"got {described.module!r}."
        )
    try:
        found: Callable[..., Any] = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise CheckpointError(
            f"the module of {kind}, {described.module}, cannot be loaded: {error}."
        ) from error
    return found
