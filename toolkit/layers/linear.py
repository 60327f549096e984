"""Matrix products with weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import nn

from toolkit.distributed import Shard, current_group, even_shard, full_shard
from toolkit.kernels.table import kernels_for
from toolkit.layers.embedding import Embedding, vocabulary_shard, vocabulary_table
from toolkit.weights import fp8, int8
from toolkit.weights.activation import FUNCTIONS
from toolkit.weights.packed import Packed, pack
from toolkit.weights.quantization import new_weight, quantizes_head
from toolkit.weights.slots import JoinedSlot, QuantizedSlot, Slot, Slots

if TYPE_CHECKING:
    from toolkit.kernels.triton.matmul import Unscaled

Split = Literal["out", "in"] | None


class Linear(nn.Module):
    """y = act(x Wᵀ + b), W: [out, in]. `activation`: a kind of `toolkit.weights.activation`.

    Under tensor parallelism each rank has, by `split`, all of W (None), a shard of its rows and so
    of the output ("out"), or a shard of its columns for that part of the input ("in"). These are
    column- and row-parallel in Megatron-LM (arXiv:1909.08053). With "in", y is this rank's part
    of a sum over the ranks, which the next norm computes."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    scale: torch.Tensor | None = None  # of each row of an FP8 or int8 weight, fp32 [out]
    gated = False  # True for act(first half of the rows) · second half
    packed: Packed | None = None  # computes the product on a CPU, in place of `weight`

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        activation: str | None = None,
        split: Split = None,
    ) -> None:
        super().__init__()
        columns = even_shard(in_features, "features") if split == "in" else full_shard(in_features)
        rows = even_shard(out_features, "features") if split == "out" else full_shard(out_features)
        self._make(columns, [rows], bias, activation)

    def _make(
        self, columns: Shard, parts: Sequence[Shard], bias: bool, activation: str | None
    ) -> None:
        """`parts`: shards of the projections whose outputs are concatenated."""
        self.columns, self.parts, self.activation = columns, tuple(parts), activation
        self.group = current_group()
        num_rows = sum(part.count for part in parts)
        weight, self.scale = new_weight(num_rows, columns.count)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = nn.Parameter(torch.empty(num_rows), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor | Unscaled) -> torch.Tensor:
        return self._product(x, self._bias())

    def can_fuse_norms(self, x: torch.Tensor) -> bool:
        """Return True if products with as many rows as x are fused with the norms around them.

        Not in float16, where rows may overflow before they are scaled, nor with FP8 weights, where
        it is slower."""
        kernels = kernels_for(x.device)
        if kernels is None or self.group.size > 1 or len(x) < 2 or x.dtype != torch.bfloat16:
            return False
        return kernels.fits_linear(len(x), self.weight)

    def add_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        square_sums: torch.Tensor,
    ) -> Unscaled:
        """Return the RMS norm of product + residual, which is written into `residual`.

        weight: the norm's; square_sums: see `_Normalization.after`. Needs `can_fuse_norms`."""
        kernels = kernels_for(x.device)
        assert kernels is not None
        assert self.activation is None
        return kernels.linear_add_norm(
            x, self.weight, residual, weight, eps, square_sums, self._bias()
        )

    def _bias(self) -> torch.Tensor | None:
        """Return this rank's bias. Only the first rank adds it to a sum over the ranks."""
        return self.bias if self.columns.is_full or self.group.rank == 0 else None

    def _product(self, x: torch.Tensor | Unscaled, bias: torch.Tensor | None) -> torch.Tensor:
        kernels = kernels_for(x.device)
        if kernels is not None and kernels.fits_linear(len(x), self.weight):
            return kernels.linear(x, self.weight, bias, self.activation)
        assert isinstance(x, torch.Tensor), "see can_fuse_norms"
        if self.packed is not None:
            return self.packed(x)
        if self.scale is not None:
            return fp8.linear(x, self.weight, self.scale, bias, self.activation)
        if kernels is None:
            y = F.linear(x, self.weight, bias)
            return FUNCTIONS[self.activation](y) if self.activation else y
        if self.activation == "gelu_tanh" and bias is not None and x.dtype != torch.float32:
            # cuBLAS adds the bias and applies this form of GELU while the sums are in registers.
            return torch._addmm_activation(bias, x, self.weight.T, use_gelu=True)
        y = kernels.large_linear(x, self.weight, bias)
        return kernels.activation(y, self.activation) if self.activation else y

    def pack(self) -> None:
        """Pack the weight for a CPU, if it has such a layout, and free the plain weight.

        Called once, after loading."""
        self.packed = pack(
            self.weight.detach(),
            self._bias(),
            self.scale,
            activation=self.activation,
            gated=self.gated,
        )
        if self.packed is not None:
            self.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def slots(self, name: str, *, transpose: bool = False) -> Slots:
        """Return the slots of the layer whose checkpoint name is `name`."""
        return {
            f"{name}.{kind}": slot
            for kind, slot in self._part_slots(0, self.parts[0], transpose).items()
        }

    def _part_slots(self, index: int, shard: Shard, transpose: bool = False) -> dict[str, Slot]:
        """Return the slots of a projection's weight and bias. `shard`: of the checkpoint's rows."""
        first = sum(part.count for part in self.parts[:index])
        rows = slice(first, first + shard.count)
        shards = shard, self.columns
        if self.scale is None:
            slots = {"weight": Slot(self.weight[rows], transpose, shards)}
        else:
            scale = self.scale[rows]
            slots = {"weight": QuantizedSlot(self.weight[rows], transpose, shards, scale=scale)}
        if self.bias is not None:
            slots["bias"] = Slot(self.bias[rows], shards=(shard,))
        return slots


class MergedLinear(Linear):
    """Several projections of one input as one product. The outputs are concatenated."""

    def __init__(self, in_features: int, parts: Sequence[Shard], *, bias: bool) -> None:
        """`parts`: this rank's shard of each projection's output."""
        nn.Module.__init__(self)
        self._make(full_shard(in_features), parts, bias, None)

    def merged_slots(self, names: Sequence[str]) -> Slots:
        """Return the slots of projections with a checkpoint name each, in order."""
        return {
            f"{name}.{kind}": slot
            for index, (name, part) in enumerate(zip(names, self.parts, strict=True))
            for kind, slot in self._part_slots(index, part).items()
        }

    def slots(self, name: str, *, transpose: bool = False) -> Slots:
        """Return the slots of a checkpoint that has the projections concatenated."""
        total, begin = sum(part.total for part in self.parts), 0
        joined: dict[str, list[Slot]] = {}
        for index, part in enumerate(self.parts):
            shard = Shard(total, begin + part.begin, part.count)
            for kind, slot in self._part_slots(index, shard, transpose).items():
                joined.setdefault(kind, []).append(slot)
            begin += part.total
        return {f"{name}.{kind}": JoinedSlot(slots) for kind, slots in joined.items()}


class OutputHead(Linear):
    """Projection from hidden states to logits.

    The weight is padded with rows whose logits are never read: rows of logits then begin at an
    aligned address, which GPUs read and write faster."""

    def __init__(self, hidden: int, vocab_size: int, tied: Embedding | None = None) -> None:
        """`tied`: the embedding that shares the weight."""
        nn.Module.__init__(self)
        self.vocab_size, self.activation, self.bias = vocab_size, None, None
        self.group, self.columns = current_group(), full_shard(hidden)
        self.parts = (vocabulary_shard(vocab_size),)
        self._tied = (tied,)  # a tuple, so that it is no submodule
        self._quantized = quantizes_head()
        self.weight = (
            tied.table
            if tied
            else nn.Parameter(vocabulary_table(vocab_size, hidden), requires_grad=False)
        )

    def forward(
        self, x: torch.Tensor | Unscaled, buffer: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return logits [n, vocab_size] of x [n, hidden].

        On a GPU they are a view of `buffer` [n, rows of all ranks' weights], if it is given."""
        assert isinstance(x, torch.Tensor), "the last norm's output is complete"
        kernels = kernels_for(x.device)
        own = buffer if self.group.size == 1 else None
        if self.packed is not None:
            logits = self.packed(x, torch.float32)
        elif own is None or kernels is None:
            logits = super().forward(x)
        elif kernels.fits_linear(len(x), self.weight):
            logits = kernels.linear(x, self.weight, out=own)
        else:
            logits = torch.mm(x, self.weight.T, out=own)
        logits = self.group.all_gather(logits, buffer)[:, : self.vocab_size]
        return logits if logits.is_cuda else logits.contiguous()

    def pack(self) -> None:
        weight = self.weight.detach()
        weight, scale = int8.quantize(weight) if self._quantized else (weight, None)
        self.packed = pack(weight, None, scale, activation=None, gated=False)
        if self.packed is not None:
            self.weight = nn.Parameter(torch.empty(0), requires_grad=False)
            (tied,) = self._tied
            if tied is not None:
                tied.use_packed(self.packed)


class GatedLinear(MergedLinear):
    """act(gate) · up of one input (Shazeer, 2020). `weight` holds gate's rows, then up's."""

    activation: str
    gated = True

    def __init__(self, in_features: int, out_features: int, *, bias: bool, activation: str) -> None:
        shard = even_shard(out_features, "features")
        super().__init__(in_features, (shard, shard), bias=bias)
        self.activation = activation

    def forward(self, x: torch.Tensor | Unscaled) -> torch.Tensor:
        kernels = kernels_for(x.device)
        if kernels is not None and kernels.fits_linear(len(x), self.weight):
            return kernels.linear(x, self.weight, self.bias, self.activation, gated=True)
        assert isinstance(x, torch.Tensor), "see can_fuse_norms"
        if self.packed is not None:
            return self.packed(x)
        if self.scale is not None:
            return fp8.linear(x, self.weight, self.scale, self.bias, self.activation, gated=True)
        if kernels is None:
            gate, up = F.linear(x, self.weight, self.bias).chunk(2, dim=1)
            return FUNCTIONS[self.activation](gate) * up
        return kernels.gated_activation(
            kernels.large_linear(x, self.weight, self.bias), self.activation
        )
