"""Matrix products with weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from toolkit.layers.activation import FUNCTIONS
from toolkit.layers.embedding import Embedding, padded_table
from toolkit.layers.fused import fused
from toolkit.layers.weights import QuantizedSlot, Slot, Slots
from toolkit.quantization import fp8, new_weight

PACKED_ROWS = 16
"""Rows of the products that a packed layout is made for; it serves any number."""


class Linear(nn.Module):
    """y = act(x Wᵀ + b), W: [out, in]. `activation` is a kind of `toolkit.layers.activation`, or none."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    scale: torch.Tensor | None = None
    """Of each row of the weight, fp32 [out], where it is in FP8 (`toolkit.quantization`)."""
    packed: torch.Tensor | None = None

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, activation: str | None = None
    ) -> None:
        super().__init__()
        self.activation = activation
        weight, self.scale = new_weight(out_features, in_features)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is not None:
            return fp8.linear(x, self.weight, self.scale, self.bias, self.activation)
        kernels = fused(x.device)
        if kernels is None:
            y = self._product(x)
            return FUNCTIONS[self.activation](y) if self.activation else y
        if kernels.fits(len(x), self.weight):
            fused_y: torch.Tensor = kernels.linear(x, self.weight, self.bias, self.activation)
            return fused_y
        if self.activation == "gelu_tanh" and self.bias is not None and x.dtype != torch.float32:
            # cuBLAS adds the bias and applies the tanh form of GELU while it has the sums in registers.
            return torch._addmm_activation(self.bias, x, self.weight.T, use_gelu=True)
        y = self._product(x)
        return kernels.activation(y, self.activation) if self.activation else y

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is not None:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
            return y
        return F.linear(x, self.weight, self.bias)

    def pack(self) -> None:
        """Puts the weight into oneDNN's own layout, where this CPU and type have one; once, after loading.

        Products of few rows are 2 to 7 times as fast as with the plain layout, which is then given up.
        """
        if can_pack(self.weight.dtype):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), PACKED_ROWS)
            self.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def slots(self, name: str, *, transpose: bool = False) -> Slots:
        """The layer's tensors under the checkpoint's name for it."""
        return self._slots(name, slice(None), transpose=transpose)

    def _slots(self, name: str, rows: slice, *, transpose: bool = False) -> Slots:
        """The tensors of some rows of the weight."""
        weight = self.weight[rows]
        if self.scale is None:
            slots = {f"{name}.weight": Slot(weight, transpose)}
        else:
            slots = {f"{name}.weight": QuantizedSlot(weight, transpose, scale=self.scale[rows])}
        if self.bias is not None:
            slots[f"{name}.bias"] = Slot(self.bias[rows])
        return slots


class MergedLinear(Linear):
    """Several projections of one input, done as one product; the outputs lie side by side."""

    def __init__(self, in_features: int, out_features: Sequence[int], *, bias: bool) -> None:
        super().__init__(in_features, sum(out_features), bias=bias)
        self.out_features = tuple(out_features)

    def merged_slots(self, names: Sequence[str]) -> Slots:
        """The tensors of the projections that the checkpoint keeps apart, in order."""
        slots: Slots = {}
        start = 0
        for name, size in zip(names, self.out_features, strict=True):
            slots |= self._slots(name, slice(start, start + size))
            start += size
        return slots


class OutputHead(Linear):
    """hidden to vocabulary. Rows of padding make every row of logits begin at an aligned address, which GPUs read and write
    faster; what stands in them is never looked at.
    """

    def __init__(self, hidden: int, vocab_size: int, tied: Embedding | None = None) -> None:
        """`tied`: the embedding whose table is also the weight."""
        nn.Module.__init__(self)
        self.vocab_size, self.activation, self.bias = vocab_size, None, None
        self.weight = (
            tied.table if tied else nn.Parameter(padded_table(vocab_size, hidden), requires_grad=False)
        )

    def forward(self, x: torch.Tensor, buffer: torch.Tensor | None = None) -> torch.Tensor:
        """[n, hidden] to [n, vocab_size]; on a GPU a view of `buffer` [n, rows of the weight], where one is given."""
        kernels = fused(x.device)
        if buffer is None or kernels is None:
            logits = super().forward(x)
        elif kernels.fits(len(x), self.weight):
            logits = kernels.linear(x, self.weight, out=buffer)
        else:
            logits = torch.mm(x, self.weight.T, out=buffer)
        return logits[:, : self.vocab_size]

    def slots(self, name: str, *, transpose: bool = False) -> Slots:
        return self._slots(name, slice(self.vocab_size), transpose=transpose)


class GatedLinear(MergedLinear):
    """act(gate) · up of one input, both [num_tokens, out] (Shazeer, 2020); `weight` holds gate's rows, then up's."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, activation: str) -> None:
        super().__init__(in_features, (out_features, out_features), bias=bias)
        self.gate = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is not None:
            return fp8.linear(x, self.weight, self.scale, self.bias, self.gate, gated=True)
        kernels = fused(x.device)
        if kernels is None:
            gate, up = self._product(x).chunk(2, dim=1)
            return FUNCTIONS[self.gate](gate) * up
        if kernels.fits(len(x), self.weight):
            y: torch.Tensor = kernels.linear(x, self.weight, self.bias, self.gate, gated=True)
        else:
            y = kernels.gated_activation(self._product(x), self.gate)
        return y


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN has packed products of this type here."""
    if not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
