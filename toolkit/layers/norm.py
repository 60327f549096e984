"""Normalization, fused with the residual sum before it."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from toolkit.distributed import current_group
from toolkit.kernels import cpu
from toolkit.kernels.cpu.norm import DTYPES, Norm
from toolkit.kernels.table import Kernels, kernels_for
from toolkit.weights.slots import Slot, Slots

if TYPE_CHECKING:
    from toolkit.kernels.triton.matmul import Unscaled
    from toolkit.layers.linear import Linear


class _Normalization(nn.Module, abc.ABC):
    """(norm(x + residual), x + residual) of x and residual, both [num_tokens, size].

    The sum may be written into `residual`. Under tensor parallelism an x with a residual is a
    row-parallel product: the ranks' parts are summed here, in the same kernel where that is
    fastest."""

    bias: nn.Parameter | None
    packed: Norm | None = None  # computes it on a CPU

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)
        self.register_parameter("bias", None)
        self.eps = eps
        self.group = current_group()

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is not None and self.group.size > 1:
            if self.group.peer_memory is not None:
                both = self.group.peer_memory.all_reduce_norm(
                    x, residual, self.weight, self.bias, self.eps
                )
                if both is not None:
                    return both
            x = self.group.all_reduce(x)
        if self.packed is not None:
            normed, total = self.packed(x, residual)
            return normed, total
        kernels = kernels_for(x.device)
        if kernels is not None:
            return self._add_norm(kernels, x, residual)
        total = x if residual is None else x + residual
        return self._norm(total), total

    def after(
        self,
        product: Linear,
        x: torch.Tensor,
        residual: torch.Tensor,
        into: Linear,
        square_sums: torch.Tensor | None,
    ) -> tuple[torch.Tensor | Unscaled, torch.Tensor]:
        """Apply the norm to product(x) and residual. The norm's output is the input of `into`.

        square_sums: fp64 zeros [len(x) or more], not shared with other calls; None if the products
        fuse no norms (`Linear.can_fuse_norms`)."""
        both: tuple[torch.Tensor, torch.Tensor] = self(product(x), residual)
        return both

    @abc.abstractmethod
    def _add_norm(
        self, kernels: Kernels, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (norm, sum) by a GPU's kernels."""

    @abc.abstractmethod
    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        """Return norm(x) by PyTorch."""

    def pack(self) -> None:
        """Prepare the CPU kernel, if there is one. Called once, after loading."""
        if cpu.available() and self.weight.dtype in DTYPES:
            self.packed = Norm(self.weight, self.bias, self.eps)


class LayerNorm(_Normalization):
    """Layer normalization (Ba et al., 2016)."""

    bias: nn.Parameter

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        self.bias = nn.Parameter(torch.zeros(size), requires_grad=False)

    def _add_norm(
        self, kernels: Kernels, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return kernels.add_layer_norm(x, residual, self.weight, self.bias, self.eps)

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def slots(self, name: str) -> Slots:
        return {f"{name}.weight": Slot(self.weight), f"{name}.bias": Slot(self.bias)}


class RMSNorm(_Normalization):
    """Root mean square normalization (Zhang & Sennrich, 2019)."""

    def after(
        self,
        product: Linear,
        x: torch.Tensor,
        residual: torch.Tensor,
        into: Linear,
        square_sums: torch.Tensor | None,
    ) -> tuple[torch.Tensor | Unscaled, torch.Tensor]:
        """Fuse the norm into the two products if both have few rows."""
        if square_sums is not None and product.can_fuse_norms(x) and into.can_fuse_norms(x):
            square_sums = square_sums[: len(x)]
            return product.add_norm(x, residual, self.weight, self.eps, square_sums), residual
        return super().after(product, x, residual, into, square_sums)

    def _add_norm(
        self, kernels: Kernels, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return kernels.add_rms_norm(x, residual, self.weight, self.eps)

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def slots(self, name: str) -> Slots:
        return {f"{name}.weight": Slot(self.weight)}
