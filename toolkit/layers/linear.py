"""Matrix products with weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import nn

from toolkit.distributed import Share, current, even, whole
from toolkit.layers.embedding import Embedding, vocabulary_share, vocabulary_table
from toolkit.layers.fused import fused
from toolkit.weights import fp8, int8
from toolkit.weights.activation import FUNCTIONS
from toolkit.weights.packed import Packed, pack
from toolkit.weights.quantization import new_weight, quantizes_head
from toolkit.weights.slots import JoinedSlot, QuantizedSlot, Slot, Slots

if TYPE_CHECKING:
    from toolkit.kernels.triton.matmul import Unscaled

Split = Literal["out", "in"] | None


class Linear(nn.Module):
    """y = act(x Wᵀ + b), W: [out, in]. `activation` is a kind of `toolkit.weights.activation`, or none.

    Under tensor parallelism `split` says what of W each rank has: all of it (None); a share of its rows, and so of the
    output ("out": column-parallel, in the words of Megatron-LM, arXiv:1909.08053); or a share of its columns, for as much of the
    input ("in": row-parallel), and then y is this rank's part of a sum, which the norm that comes next adds up.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    scale: torch.Tensor | None = None
    """Of each row of the weight, fp32 [out], where it is in FP8 or int8 (`toolkit.weights.quantization`)."""
    gated = False
    """Whether the output is that of the first half of the weight's rows, activated, times that of the second."""
    packed: Packed | None = None
    """What computes the product on a CPU, in the weight's place."""

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
        columns = even(in_features, "features") if split == "in" else whole(in_features)
        rows = even(out_features, "features") if split == "out" else whole(out_features)
        self._make(columns, [rows], bias, activation)

    def _make(
        self, columns: Share, parts: Sequence[Share], bias: bool, activation: str | None
    ) -> None:
        """`parts`: of the projections whose outputs lie side by side."""
        self.columns, self.parts, self.activation = columns, tuple(parts), activation
        self.group = current()
        num_rows = sum(part.count for part in parts)
        weight, self.scale = new_weight(num_rows, columns.count)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = nn.Parameter(torch.empty(num_rows), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor | Unscaled) -> torch.Tensor:
        return self._product(x, self._bias())

    def joins_norms(self, x: torch.Tensor) -> bool:
        """Whether products of as many rows as x has are computed with the norms around them. (In float16, rows that are not
        scaled yet may not fit. With weights in FP8 it is slower.)
        """
        kernels = fused(x.device)
        if kernels is None or self.group.size > 1 or len(x) < 2 or x.dtype != torch.bfloat16:
            return False
        return bool(kernels.fits(len(x), self.weight))

    def add_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        squares: torch.Tensor,
    ) -> Unscaled:
        """The root mean square norm, with this weight, of the output and `residual`, which becomes their sum; where `joins_norms`.
        squares: as in `_Normalization.after`.
        """
        kernels = fused(x.device)
        assert kernels is not None
        assert self.activation is None
        normed: Unscaled = kernels.add_norm(
            x, self.weight, residual, weight, eps, squares, self._bias()
        )
        return normed

    def _bias(self) -> torch.Tensor | None:
        """What this rank adds: of a sum's parts, the first has it."""
        return self.bias if self.columns.whole or self.group.rank == 0 else None

    def _product(self, x: torch.Tensor | Unscaled, bias: torch.Tensor | None) -> torch.Tensor:
        kernels = fused(x.device)
        if kernels is not None and kernels.fits(len(x), self.weight):
            fused_y: torch.Tensor = kernels.linear(x, self.weight, bias, self.activation)
            return fused_y
        assert isinstance(x, torch.Tensor), "see joins_norms"
        if self.packed is not None:
            return self.packed(x)
        if self.scale is not None:
            return fp8.linear(x, self.weight, self.scale, bias, self.activation)
        if kernels is None:
            y = F.linear(x, self.weight, bias)
            return FUNCTIONS[self.activation](y) if self.activation else y
        if self.activation == "gelu_tanh" and bias is not None and x.dtype != torch.float32:
            # cuBLAS adds the bias and applies the tanh form of GELU while it has the sums in registers.
            return torch._addmm_activation(bias, x, self.weight.T, use_gelu=True)
        large: torch.Tensor = kernels.large_linear(x, self.weight, bias)
        return kernels.activation(large, self.activation) if self.activation else large

    def pack(self) -> None:
        """Puts the weight into the layout that a CPU multiplies fastest with, where it has one; once, after loading. The plain layout
        is then given up.
        """
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
        """The layer's tensors under the checkpoint's name for it."""
        return {
            f"{name}.{kind}": slot
            for kind, slot in self._places(0, self.parts[0], transpose).items()
        }

    def _places(self, index: int, share: Share, transpose: bool = False) -> dict[str, Slot]:
        """Where weight and bias of a projection go; `share`: what of the checkpoint's rows goes there."""
        first = sum(part.count for part in self.parts[:index])
        rows = slice(first, first + share.count)
        shares = share, self.columns
        if self.scale is None:
            places = {"weight": Slot(self.weight[rows], transpose, shares)}
        else:
            scale = self.scale[rows]
            places = {"weight": QuantizedSlot(self.weight[rows], transpose, shares, scale=scale)}
        if self.bias is not None:
            places["bias"] = Slot(self.bias[rows], shares=(share,))
        return places


class MergedLinear(Linear):
    """Several projections of one input, done as one product; the outputs lie side by side."""

    def __init__(self, in_features: int, parts: Sequence[Share], *, bias: bool) -> None:
        """`parts`: how much of each projection's output this rank has."""
        nn.Module.__init__(self)
        self._make(whole(in_features), parts, bias, None)

    def merged_slots(self, names: Sequence[str]) -> Slots:
        """The tensors of the projections that the checkpoint keeps apart, in order."""
        return {
            f"{name}.{kind}": slot
            for index, (name, part) in enumerate(zip(names, self.parts, strict=True))
            for kind, slot in self._places(index, part).items()
        }

    def slots(self, name: str, *, transpose: bool = False) -> Slots:
        """The tensors of a checkpoint that keeps the projections together, one after the other."""
        total, begin = sum(part.total for part in self.parts), 0
        joined: dict[str, list[Slot]] = {}
        for index, part in enumerate(self.parts):
            share = Share(total, begin + part.begin, part.count)
            for kind, slot in self._places(index, share, transpose).items():
                joined.setdefault(kind, []).append(slot)
            begin += part.total
        return {f"{name}.{kind}": JoinedSlot(slots) for kind, slots in joined.items()}


class OutputHead(Linear):
    """hidden to vocabulary. Rows of padding make every row of logits begin at an aligned address, which GPUs read and write
    faster; what stands in them is never looked at.
    """

    def __init__(self, hidden: int, vocab_size: int, tied: Embedding | None = None) -> None:
        """`tied`: the embedding whose table is also the weight."""
        nn.Module.__init__(self)
        self.vocab_size, self.activation, self.bias = vocab_size, None, None
        self.group, self.columns, self.parts = (
            current(),
            whole(hidden),
            (vocabulary_share(vocab_size),),
        )
        self._tied = (tied,)  # in a tuple, it is no module of this one's
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

        On a GPU they are a view of `buffer` [n, rows of all ranks' weights], where one is given.
        """
        assert isinstance(x, torch.Tensor), "the last norm's output is complete"
        kernels = fused(x.device)
        own = buffer if self.group.size == 1 else None
        if self.packed is not None:
            logits = self.packed(x, torch.float32)
        elif own is None or kernels is None:
            logits = super().forward(x)
        elif kernels.fits(len(x), self.weight):
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
                tied.share(self.packed)


class GatedLinear(MergedLinear):
    """act(gate) · up of one input, both [num_tokens, out] (Shazeer, 2020); `weight` holds gate's rows, then up's."""

    activation: str
    gated = True

    def __init__(self, in_features: int, out_features: int, *, bias: bool, activation: str) -> None:
        share = even(out_features, "features")
        super().__init__(in_features, (share, share), bias=bias)
        self.activation = activation

    def forward(self, x: torch.Tensor | Unscaled) -> torch.Tensor:
        kernels = fused(x.device)
        if kernels is not None and kernels.fits(len(x), self.weight):
            y: torch.Tensor = kernels.linear(x, self.weight, self.bias, self.activation, gated=True)
            return y
        assert isinstance(x, torch.Tensor), "see joins_norms"
        if self.packed is not None:
            return self.packed(x)
        if self.scale is not None:
            return fp8.linear(x, self.weight, self.scale, self.bias, self.activation, gated=True)
        if kernels is None:
            gate, up = F.linear(x, self.weight, self.bias).chunk(2, dim=1)
            return FUNCTIONS[self.activation](gate) * up
        y = kernels.gated_activation(
            kernels.large_linear(x, self.weight, self.bias), self.activation
        )
        return y  # noqa: RET504  # typed above: the kernels are not
