"""Norms of rows, fused with the residual sum before them."""

import ctypes
from collections.abc import Sequence

import torch

from toolkit.kernels.cpu.library import FLOAT, POINTER, SIZE, Kernel
from toolkit.kernels.reference import Norm

DTYPES = (torch.float32, torch.bfloat16)
_join = Kernel("tk_join", POINTER, POINTER, POINTER, POINTER, POINTER, SIZE)
_norm_rows = Kernel("tk_norm_rows", POINTER, POINTER, SIZE, SIZE)


class _Norm(ctypes.Structure):
    """Mirror of `Norm` in norm.cpp."""

    _fields_ = [  # ctypes wants a list
        ("weight", POINTER),
        ("bias", POINTER),
        ("is_centered", ctypes.c_int32),
        ("eps", FLOAT),
    ]


class _Join(ctypes.Structure):
    """Mirror of `Join` in norm.cpp."""

    _fields_ = [
        ("norms", _Norm * 2),
        ("post", _Norm),
        ("num_norms", SIZE),
        ("size", SIZE),
        ("is_bf16", SIZE),
        ("scale", FLOAT),
        ("factor", FLOAT),
    ]


class Join:
    """`reference.join` of rows in fp32 or bfloat16, with copies of the norms' parameters in fp32.

    Raises ValueError for parameters that are not on a CPU or not of this size."""

    def __init__(
        self,
        size: int,
        norms: Sequence[Norm],
        post: Norm | None = None,
        scale: float = 1.0,
        factor: float = 1.0,
    ) -> None:
        self.size, self.num_norms = size, len(norms)
        self._is_sum = post is not None or (scale, factor) != (1.0, 1.0)
        self._parameters: list[torch.Tensor] = []  # the structures have only their addresses
        given = [self._norm(norm) for norm in norms], _Norm() if post is None else self._norm(post)
        self._joins = {
            dtype: _Join(
                *((_Norm * 2)(*given[0]), given[1], len(norms), size, dtype == torch.bfloat16),
                *(scale, factor),
            )
            for dtype in DTYPES
        }
        self.addresses = {dtype: ctypes.addressof(join) for dtype, join in self._joins.items()}

    def _norm(self, norm: Norm) -> _Norm:
        return _Norm(
            self._address(norm.weight),
            None if norm.bias is None else self._address(norm.bias),
            norm.is_centered,
            norm.eps,
        )

    def _address(self, values: torch.Tensor) -> int:
        if values.shape != (self.size,) or values.device.type != "cpu":
            raise ValueError(
                f"a norm's parameters must be [{self.size}] on a CPU, not {list(values.shape)} on "
                f"{values.device.type}"
            )
        self._parameters.append(values.detach().float().contiguous())
        return self._parameters[-1].data_ptr()

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        other: torch.Tensor | None = None,
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return (norms of the sum, the sum). x, residual, other: `[num_tokens, size]`.

        Raises ValueError for other shapes and types, and for a product that nothing is added to."""
        shape, dtype = x.shape, x.dtype
        if len(shape) != 2 or shape[1] != self.size or dtype not in self.addresses:
            raise ValueError(
                f"x must be [rows, {self.size}] in fp32 or bfloat16, not {list(shape)} in {dtype}"
            )
        for rows in (x, residual, other):
            if rows is not None and (
                rows.dtype != dtype or rows.shape != shape or not rows.is_contiguous()
            ):
                raise ValueError(
                    f"the rows must be {list(shape)} in {dtype}, contiguous, not "
                    f"{list(rows.shape)} in {rows.dtype}"
                )
        if residual is None and (other is not None or self._is_sum):
            raise ValueError("other, post, scale and factor need a residual")
        outs = torch.empty(self.num_norms, *shape, dtype=dtype)
        _join.run(
            self.addresses[dtype],
            x.data_ptr(),
            None if other is None else other.data_ptr(),
            None if residual is None else residual.data_ptr(),
            outs.data_ptr(),
            shape[0],
        )
        return [outs[i] for i in range(self.num_norms)], x if residual is None else residual


class RowNorm:
    """`reference.rms_norm_rows` of rows in fp32 or bfloat16."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._join = Join(len(weight), [Norm(weight, None, eps, False)])

    def __call__(self, x: torch.Tensor) -> None:
        """Norm x `[num_tokens, size]` in place. Its rows may be apart, as a slice of wider ones."""
        size, addresses = self._join.size, self._join.addresses
        if x.dim() != 2 or x.shape[1] != size or x.dtype not in addresses or x.stride(1) != 1:
            raise ValueError(
                f"x must be [rows, {size}] in fp32 or bfloat16, each row contiguous, not "
                f"{list(x.shape)} in {x.dtype}"
            )
        _norm_rows.run(addresses[x.dtype], x.data_ptr(), x.stride(0), x.shape[0])
