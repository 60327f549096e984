"""Whether our fused kernels run on a device, and where they are."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import torch


@cache
def fused(device: torch.device) -> SimpleNamespace | None:
    """The fused kernels for a device; None where plain PyTorch serves: on CPUs, and without Triton."""
    if device.type != "cuda":
        return None
    try:
        import triton  # noqa: F401
    except ImportError:
        return None
    from toolkit.kernels import cublas
    from toolkit.kernels.triton.activation import activation, gated_activation
    from toolkit.kernels.triton.embedding import embed_share
    from toolkit.kernels.triton.linear import add_norm, fits, linear
    from toolkit.kernels.triton.norm import add_layer_norm, add_rms_norm

    return SimpleNamespace(
        activation=activation,
        gated_activation=gated_activation,
        add_layer_norm=add_layer_norm,
        add_rms_norm=add_rms_norm,
        add_norm=add_norm,
        embed_share=embed_share,
        linear=linear,
        large_linear=cublas.linear,
        fits=fits,
    )
