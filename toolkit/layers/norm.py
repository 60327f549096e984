"""Normalization, fused with the residual sum that comes before it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from toolkit.layers.fused import fused
from toolkit.layers.weights import Slot, Slots


class LayerNorm(nn.Module):
    """Layer normalization (Ba et al., 2016)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual); both [num_tokens, size]. On a GPU the sum is written into `residual`."""
        kernels = fused(x.device)
        if kernels is not None:
            both: tuple[torch.Tensor, torch.Tensor] = kernels.add_layer_norm(
                x, residual, self.weight, self.bias, self.eps
            )
            return both
        residual = x if residual is None else x + residual
        return F.layer_norm(residual, self.weight.shape, self.weight, self.bias, self.eps), residual

    def slots(self, name: str) -> Slots:
        return {f"{name}.weight": Slot(self.weight), f"{name}.bias": Slot(self.bias)}


class RMSNorm(nn.Module):
    """Root mean square normalization (Zhang & Sennrich, 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual); both [num_tokens, size]. On a GPU the sum is written into `residual`."""
        kernels = fused(x.device)
        if kernels is not None:
            both: tuple[torch.Tensor, torch.Tensor] = kernels.add_rms_norm(x, residual, self.weight, self.eps)
            return both
        residual = x if residual is None else x + residual
        return F.rms_norm(residual, self.weight.shape, self.weight, self.eps), residual

    def slots(self, name: str) -> Slots:
        return {f"{name}.weight": Slot(self.weight)}
