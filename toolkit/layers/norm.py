"""Normalization, fused with the residual sum that comes before it."""

from __future__ import annotations

import abc
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from toolkit.distributed import current
from toolkit.kernels import cpu
from toolkit.kernels.cpu.norm import DTYPES, Norm
from toolkit.layers.fused import fused
from toolkit.weights.slots import Slot, Slots

if TYPE_CHECKING:
    from toolkit.kernels.triton.matmul import Unscaled
    from toolkit.layers.linear import Linear


class _Normalization(nn.Module, abc.ABC):
    """(norm(x + residual), x + residual) of x and residual, both [num_tokens, size]. The sum may be written
    into `residual`.

    Under tensor parallelism an x that comes with a residual is this rank's part of it, as row-parallel products are: the ranks' are added
    up here, in one kernel with the rest where that is fastest.
    """

    bias: nn.Parameter | None
    packed: Norm | None = None
    """What computes it on a CPU."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)
        self.register_parameter("bias", None)
        self.eps = eps
        self.group = current()

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is not None and self.group.size > 1:
            if self.group.symmetric is not None:
                both = self.group.symmetric.all_reduce_norm(
                    x, residual, self.weight, self.bias, self.eps
                )
                if both is not None:
                    return both
            x = self.group.all_reduce(x)
        if self.packed is not None:
            normed, total = self.packed(x, residual)
            return normed, total
        kernels = fused(x.device)
        if kernels is not None:
            return self._fused(kernels, x, residual)
        total = x if residual is None else x + residual
        return self._plain(total), total

    def after(
        self,
        product: Linear,
        x: torch.Tensor,
        residual: torch.Tensor,
        into: Linear,
        squares: torch.Tensor | None,
    ) -> tuple[torch.Tensor | Unscaled, torch.Tensor]:
        """The same of product(x) and residual, as `into` takes it. squares: fp64 zeros, as many as rows of x or more, for this
        call alone; None where the products join no norms.
        """
        both: tuple[torch.Tensor, torch.Tensor] = self(product(x), residual)
        return both

    @abc.abstractmethod
    def _fused(
        self, kernels: SimpleNamespace, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm, sum) through our kernels for a GPU."""

    @abc.abstractmethod
    def _plain(self, x: torch.Tensor) -> torch.Tensor:
        """norm(x) through PyTorch."""

    def pack(self) -> None:
        """Prepares our kernel, where it runs; once, after loading, on a CPU."""
        if cpu.available() and self.weight.dtype in DTYPES:
            self.packed = Norm(self.weight, self.bias, self.eps)


class LayerNorm(_Normalization):
    """Layer normalization (Ba et al., 2016)."""

    bias: nn.Parameter

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        self.bias = nn.Parameter(torch.zeros(size), requires_grad=False)

    def _fused(
        self, kernels: SimpleNamespace, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        both: tuple[torch.Tensor, torch.Tensor] = kernels.add_layer_norm(
            x, residual, self.weight, self.bias, self.eps
        )
        return both

    def _plain(self, x: torch.Tensor) -> torch.Tensor:
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
        squares: torch.Tensor | None,
    ) -> tuple[torch.Tensor | Unscaled, torch.Tensor]:
        """In no kernel of its own where both products are of few rows."""
        if squares is not None and product.joins_norms(x) and into.joins_norms(x):
            return product.add_norm(x, residual, self.weight, self.eps, squares[: len(x)]), residual
        return super().after(product, x, residual, into, squares)

    def _fused(
        self, kernels: SimpleNamespace, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        both: tuple[torch.Tensor, torch.Tensor] = kernels.add_rms_norm(
            x, residual, self.weight, self.eps
        )
        return both

    def _plain(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def slots(self, name: str) -> Slots:
        return {f"{name}.weight": Slot(self.weight)}
