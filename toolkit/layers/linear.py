"""Matrix products with weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from toolkit.distributed import Shard, current_group, even_shard, full_shard
from toolkit.kernels import reference
from toolkit.kernels.table import kernels_for
from toolkit.layers.embedding import Embedding, padded, vocabulary_shard
from toolkit.weights.formats import Packing
from toolkit.weights.loading.collected import packed_slots
from toolkit.weights.quantization import (
    find_packing,
    new_head_weight,
    new_packed_weight,
    new_weight,
)
from toolkit.weights.slots import JoinedSlot, Slot, Slots, StackedSlot, joined_slot
from toolkit.weights.source import Source
from toolkit.weights.weight import Epilogue, Weight, parameter

if TYPE_CHECKING:
    from toolkit.kernels.triton.products.matmul import Unscaled
    from toolkit.weights.weight import Rows

Split = Literal["out", "in"] | None


class Linear(nn.Module):
    """y = act(x Wᵀ + b), W: [out, in]. `activation`: a kind of `toolkit.weights.activation`.

    Under tensor parallelism each rank has, by `split`, all of W (None), a shard of its rows and so
    of the output ("out"), or a shard of its columns for that part of the input ("in"). These are
    column- and row-parallel in Megatron-LM (arXiv:1909.08053). With "in", y is this rank's part
    of a sum over the ranks, which the next `Join` computes."""

    weight: Weight
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        source: Source,
        *,
        bias: bool,
        activation: str | None = None,
        split: Split = None,
    ) -> None:
        columns = even_shard(in_features, "features") if split == "in" else full_shard(in_features)
        rows = even_shard(out_features, "features") if split == "out" else full_shard(out_features)
        self._make(columns, [rows], [source], bias, activation)

    def _make(
        self,
        columns: Shard,
        parts: Sequence[Shard],
        sources: Sequence[Source],
        bias: bool,
        activation: str | None = None,
        gated: bool = False,
    ) -> None:
        """`parts`: shards of the projections whose outputs are concatenated."""
        super().__init__()
        self.columns, self.parts, self.sources = columns, tuple(parts), tuple(sources)
        self.group = current_group()
        self.packings = tuple(find_packing(source.name) for source in sources)
        counts = [part.count for part in parts]
        if any(self.packings):
            self.weight = new_packed_weight(counts, columns, self.packings, self._cuts_blocks)
        else:
            self.weight = new_weight(sum(counts), columns.count)
        self.bias = parameter(torch.zeros(self.weight.shape[0])) if bias else None
        # Only the first rank adds the bias to a sum over the ranks.
        is_first = columns.is_full or self.group.rank == 0
        self._end = Epilogue(self.bias if is_first else None, activation, gated)

    def forward(self, x: Rows) -> torch.Tensor:
        return self.weight.product(x, self._end)

    def product_for(self, reader: Linear, x: Rows) -> Rows:
        """Return the product of x, for `reader` alone: `Rounded` if both support that."""
        if reader.weight.reads_rounded(len(x)):
            return self.weight.rounded_product(x, self._end)
        y: torch.Tensor = self(x)
        return y

    def can_fuse_norms(self, x: Rows) -> bool:
        """Return True if products with as many rows as x are fused with the norms around them."""
        return self.group.size == 1 and self.weight.fuses_norm(len(x))

    def add_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm: reference.Norm,
        square_sums: torch.Tensor,
    ) -> Unscaled:
        """Return the RMS norm of product + residual, which is written into `residual`.

        square_sums: fp64 zeros [len(x)] of this call alone. Needs `can_fuse_norms`."""
        return self.weight.add_norm(x, self._end, residual, norm, square_sums)

    def pack(self) -> None:
        """Convert the weight to the layout of its device. Called once, after loading."""
        self.weight = self.weight.finish(self._end)

    def slots(self) -> Slots:
        """Return the slots of the projections' tensors."""
        joined: dict[str, list[Slot | JoinedSlot]] = {}
        first = 0
        for source, part, packing in zip(self.sources, self.parts, self.packings, strict=True):
            for kind, slot in self._part_slots(source, part, packing, first).items():
                found = slot if source.stack is None else StackedSlot.of(slot, source.stack)
                joined.setdefault(source.tensor(kind), []).append(found)
            first += part.count
        return {name: joined_slot(slots) for name, slots in joined.items()}

    def _cuts_blocks(self, index: int, height: int) -> bool:
        part = self.parts[index]
        return self.sources[index].cuts_blocks(part.begin, part.count, height)

    def _part_slots(
        self, source: Source, part: Shard, packing: Packing | None, first: int
    ) -> dict[str, Slot | JoinedSlot]:
        """Return the slots of a projection's weight and bias, whose first row here is `first`."""
        shard, order = part, None
        if source.order is not None:
            total, wanted = source.order.total, source.order.rows
            wanted = wanted[part.begin : part.begin + part.count]
            if isinstance(wanted, range) and wanted.step == 1:
                shard = Shard(total, wanted.start, len(wanted))
            else:
                shard, order = full_shard(total), tuple(wanted)
        rows = slice(first, first + part.count)
        slots: dict[str, Slot | JoinedSlot] = {}
        if packing is None:
            slots |= self.weight.part_slots(
                rows, (shard, self.columns), transpose=source.transpose, order=order
            )
        else:
            shards = shard, self.columns
            slots |= packed_slots(self.weight, source.name, packing, rows, shards, order)
        if self.bias is not None and source.has_bias:
            slots["bias"] = Slot(self.bias[rows], shards=(shard,), order=order)
        return slots


class MergedLinear(Linear):
    """Several projections of one input as one product. The outputs are concatenated."""

    def __init__(
        self, in_features: int, parts: Sequence[Shard], sources: Sequence[Source], *, bias: bool
    ) -> None:
        """`parts`: this rank's shard of each projection's output."""
        self._make(full_shard(in_features), parts, sources, bias)


class OutputHead(Linear):
    """Projection from hidden states to logits.

    The weight is padded with rows whose logits are never read: rows of logits then begin at an
    aligned address, which GPUs read and write faster."""

    def __init__(
        self,
        hidden: int,
        vocab_size: int,
        *,
        bias: bool = False,
        scale: float = 1.0,
        soft_cap: float = 0.0,
        tied: Embedding | None = None,
    ) -> None:
        """`tied`: the embedding that shares the weight. `scale`: of x; `soft_cap`: see
        `soft_cap_`; 0: none."""
        nn.Module.__init__(self)
        self.vocab_size = vocab_size
        self.input_scale, self.soft_cap = scale, soft_cap
        self.group, self.columns = current_group(), full_shard(hidden)
        shard = vocabulary_shard(vocab_size)
        self.parts, self.sources = (shard,), (Source("lm_head"),)
        self._tied = (tied,)  # a tuple, so that it is no submodule
        self.packings = (find_packing("lm_head") if tied is None else None,)
        self.weight = (
            new_head_weight(padded(shard.max_count), hidden, self.packings[0])
            if tied is None
            else tied.weight
        )
        # Padded like the weight.
        self.bias = parameter(torch.zeros(self.weight.shape[0])) if bias else None
        on_gpu = torch.get_default_device().type == "cuda"
        self._end = Epilogue(self.bias, dtype=None if on_gpu else torch.float32)

    def forward(self, x: Rows, buffer: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits [n, vocab_size] of x [n, hidden].

        On a GPU they are a view of `buffer` [n, rows of all ranks' weights], if it is given."""
        assert isinstance(x, torch.Tensor), "the last norm's output is complete"
        if self.input_scale != 1.0:
            x = x * self.input_scale
        own = buffer if self.group.size == 1 else None
        logits = self.weight.product(x, self._end._replace(out=own))
        logits = self.group.all_gather(logits, buffer)[:, : self.vocab_size]
        if self.soft_cap:
            soft_cap_(logits, self.soft_cap)
        return logits if logits.is_cuda else logits.contiguous()

    def slots(self) -> Slots:
        (shard,) = self.parts
        rows = slice(shard.count)
        slots: dict[str, Slot | JoinedSlot] = {}
        (packing,) = self.packings
        if packing is not None:
            shards = shard, self.columns
            slots |= packed_slots(self.weight, "lm_head", packing, rows, shards)
        elif self._tied == (None,):
            slots |= self.weight.part_slots(rows, (shard, self.columns))
        if self.bias is not None:
            slots["bias"] = Slot(self.bias[rows], shards=(shard,))
        return {f"lm_head.{kind}": slot for kind, slot in slots.items()}

    def pack(self) -> None:
        super().pack()
        (tied,) = self._tied
        if tied is not None and self.weight.has_rows:
            tied.weight = tied.weight.rebased(self.weight)


def soft_cap_(logits: torch.Tensor, cap: float) -> None:
    """Replace logits by cap * tanh(logits / cap), in fp32 (Gemma 2, arXiv:2408.00118)."""
    kernels_for(logits.device).soft_cap_(logits, cap)


class GatedLinear(Linear):
    """act(gate) · up of one input (Shazeer, 2020). The weight holds gate's rows, then up's."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sources: tuple[Source, Source],
        *,
        bias: bool,
        activation: str,
    ) -> None:
        shard = even_shard(out_features, "features")
        self._make(full_shard(in_features), (shard, shard), sources, bias, activation, gated=True)
