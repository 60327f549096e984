"""A mix of its own: gated linear attention, whose state is a row of memory. Plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from toolkit.attention import AttentionBatch
from toolkit.distributed import full_shard
from toolkit.layers import Linear, MergedLinear
from toolkit.models import mix
from toolkit.models.describe import Decoder, Layer, Mix
from toolkit.models.memory import Part, RowMemory
from toolkit.models.model import Keeper
from toolkit.models.parts import decoder, gated_mlp, pre_norm, rms_norm
from toolkit.weights.source import Source


@dataclass(frozen=True, slots=True)
class Gated(Mix):
    """S = sigmoid(gate) · S + k vᵀ for each token and head; the output is qᵀ S."""

    module = "tests.models.gated_mix:GatedMix"
    name: str
    num_heads: int = 4
    size: int = 8

    @property
    def inputs(self) -> list[tuple[Source, int]]:
        widths = dict.fromkeys("qkv", self.num_heads * self.size) | {"gate": self.num_heads}
        return [(Source(f"{self.name}.{part}"), width) for part, width in widths.items()]

    @property
    def memory(self) -> RowMemory:
        return RowMemory((Part(self.num_heads, self.size**2, in_float32=True),))

    def projections(self, hidden: int) -> Iterator[tuple[Source, int, int, bool]]:
        yield from ((source, width, hidden, False) for source, width in self.inputs)
        yield Source(f"{self.name}.out"), hidden, self.num_heads * self.size, False


class GatedMix(mix.Mix, Keeper):
    may_synchronize = True

    def __init__(self, gated: Gated, hidden: int, _: object) -> None:
        super().__init__()
        self.memory, self.shape = gated.memory, (-1, gated.num_heads, gated.size)
        sources, self.widths = zip(*gated.inputs, strict=True)
        self.input = MergedLinear(hidden, [*map(full_shard, self.widths)], sources, bias=False)
        self.output = Linear(self.widths[0], hidden, Source(f"{gated.name}.out"), bias=False)

    def bind(self, *tensors: torch.Tensor) -> None:
        (self.states,) = tensors  # [num_rows, heads, size · size]

    def forward(self, x: Any, batch: AttentionBatch) -> torch.Tensor:
        y = self.input(x)
        *parts, gate = y.float().split(self.widths, dim=1)
        (q, k, v), gate = (part.view(self.shape) for part in parts), gate.sigmoid()
        starts, out = batch.query_start_loc.tolist(), torch.empty_like(q)
        slots = zip(*(one.tolist() for one in batch.states.tensors), strict=True)
        for request, (read, write, keep, kept) in enumerate(slots):
            before = self.states[read].where(~batch.is_first[request], 0.0)  # it may have NaN
            state = before.view(-1, *self.shape[-1:] * 2).clone()
            last = starts[request + 1] - 1
            for token in range(starts[request], last + 1):
                state *= gate[token, :, None, None]
                state += k[token, :, :, None] * v[token, :, None, :]
                out[token] = torch.einsum("hk,hkv->hv", q[token], state)
                if batch.seq_lens[request] - (last - token) == kept and keep >= 0:
                    self.states[keep] = state.view_as(before)
            self.states[write] = state.view_as(before)
        return out.flatten(1).to(y.dtype)


def describe(config: Any) -> Decoder:
    def layer(name: str, index: int) -> Layer:
        norms = rms_norm(config, f"{name}.norm1"), rms_norm(config, f"{name}.norm2")
        return pre_norm(Gated(name), norms[0], gated_mlp(config, f"{name}.mlp"), norms[1])

    return decoder(config, layer, rms_norm(config, "model.norm"))
