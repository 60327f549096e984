"""Norms, fused with the residual sum before them."""

import ctypes

import torch

from toolkit.kernels.cpu.library import FLOAT, POINTER, SIZE, Kernel

DTYPES = (torch.float32, torch.bfloat16)
_add_norm = Kernel("tk_add_norm", POINTER, POINTER, POINTER, POINTER, SIZE)


class _Norm(ctypes.Structure):
    """Mirror of `Norm` in norm.cpp."""

    _fields_ = [  # ctypes wants a list
        ("weight", POINTER),
        ("bias", POINTER),
        ("size", SIZE),
        ("is_bf16", SIZE),
        ("eps", FLOAT),
    ]


class Norm:
    """`reference.add_rms_norm`, or with a bias `reference.add_layer_norm`.

    weight, bias: `[size]`, both in fp32 or both in bfloat16. Raises ValueError for others."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> None:
        parameters = [weight] if bias is None else [weight, bias]
        if any(
            p.dtype not in DTYPES or p.dtype != weight.dtype or p.shape != weight.shape
            for p in parameters
        ):
            raise ValueError(
                "a norm's parameters must be of one size, all in fp32 or all in bfloat16, not "
                f"{[(p.dtype, list(p.shape)) for p in parameters]}"
            )
        self._parameters = [p.detach().contiguous() for p in parameters]
        self.size, self.dtype = len(weight), weight.dtype
        addresses = [p.data_ptr() for p in self._parameters] + [None]
        self._norm = _Norm(*addresses[:2], self.size, self.dtype == torch.bfloat16, eps)
        self._address = ctypes.addressof(self._norm)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (norm(x + residual), x + residual) of rows `[num_tokens, size]`.

        The sum is written into `residual`."""
        shape, dtype = x.shape, self.dtype
        if len(shape) != 2 or shape[1] != self.size or x.dtype != dtype or not x.is_contiguous():
            raise ValueError(
                f"x must be [rows, {self.size}] in {dtype}, contiguous, not {list(shape)} in "
                f"{x.dtype}"
            )
        if residual is not None and (
            residual.dtype != dtype or residual.shape != shape or not residual.is_contiguous()
        ):
            raise ValueError(
                f"the residual must be like x, not {residual.dtype} {list(residual.shape)}"
            )
        out = torch.empty(shape, dtype=dtype)
        summed = None if residual is None else residual.data_ptr()
        _add_norm.run(self._address, x.data_ptr(), summed, out.data_ptr(), shape[0])
        return out, x if residual is None else residual
