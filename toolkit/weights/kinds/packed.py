"""Weights in the layout that is fastest for matrix products on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from toolkit.kernels import cpu
from toolkit.kernels.switch import kernels_are_off
from toolkit.weights.groups import Groups
from toolkit.weights.weight import Epilogue, Weight

if TYPE_CHECKING:
    from toolkit.kernels.cpu.adapters import AdaptedProduct, StepSlots
    from toolkit.kernels.cpu.product import Product
    from toolkit.weights.groups import Groups
    from toolkit.weights.weight import Rows

ONEDNN_ROWS = 16  # rows of x that oneDNN's layout is optimized for. It works with any number


def pack(
    values: torch.Tensor, scales: torch.Tensor | None, epilogue: Epilogue, dtype: torch.dtype
) -> Weight | None:
    """Pack a weight [rows, columns]. None if only the plain layout works, or is wanted.

    scales: of the rows, for int8; dtype: of the model. Uses our kernels, or oneDNN if they were
    not built. Measured on one Zen 4 core, half of gpt2's layers in fp32, oneDNN's time over ours:
    2.3 at one row, 1.7 at 4, 1.3 at 16, 1.07 at 64, 0.97 at 512."""
    if cpu.available() and values.dtype in (torch.float32, torch.bfloat16, torch.int8):
        from toolkit.kernels.cpu.linear import PackedLinear

        bias, activation, gated, result, *_ = epilogue
        linear = PackedLinear(values, bias, scales, activation=activation, gated=gated)
        return PackedWeight(linear, gated, result, dtype)
    is_packed = _onednn_has(values.dtype) and not kernels_are_off()
    return OneDNNWeight(values) if is_packed else None


def pack_groups(groups: Groups, epilogue: Epilogue, dtype: torch.dtype) -> Weight | None:
    """Pack a group-quantized weight. None if our kernels are off or were not built.

    dtype: of the model. Products round x to 8 bits."""
    if not cpu.available() or dtype == torch.float16:
        return None
    from toolkit.kernels.cpu.groups import PackedGroups

    bias, activation, gated, result, *_ = epilogue
    product = PackedGroups(
        groups.values,
        groups.scales,
        groups.offsets,
        groups.bits,
        bias,
        activation=activation,
        gated=gated,
    )
    packed = PackedWeight(product, gated, result, dtype)
    packed.order = groups.order
    return packed


class PackedWeight(Weight):
    """A weight for our CPU kernels, which contains the end of its products.

    A product with an epilogue that has no activation and gate leaves those out."""

    def __init__(
        self,
        linear: Product,
        gated: bool,
        result: torch.dtype | None,
        dtype: torch.dtype,
    ) -> None:
        """`result`: type of products; `dtype`: of rows."""
        super().__init__(2 * linear.columns if gated else linear.columns, linear.depth)
        self.has_rows = not gated
        self.order: torch.Tensor | None = None  # of the columns, see `Groups`
        self._linear, self._result, self._dtype = linear, result, dtype
        self._has_end = bool(linear.struct.activation or linear.struct.gated)

    @property
    def nbytes(self) -> int:
        return self._linear.nbytes

    def product(self, x: Rows, epilogue: Epilogue) -> torch.Tensor:
        assert isinstance(x, torch.Tensor), "see fuses_norm"
        if self.order is not None:
            x = x[:, self.order]
        if self._has_end and epilogue.activation is None and not epilogue.gated:
            return self._linear.sums(x, self._result)
        return self._linear(x, self._result)

    def adapted(self, step: StepSlots, num_slots: int, max_ranks: int) -> AdaptedProduct:
        """Return the product with its end, which adds adapters before activation and gate."""
        from toolkit.kernels.cpu.adapters import AdaptedProduct

        return AdaptedProduct(self._linear, step, num_slots, max_ranks)

    def adapted_product(self, adapted: AdaptedProduct, x: torch.Tensor) -> torch.Tensor:
        own = x if self.order is None else x[:, self.order]
        return adapted(x, own, self._result or x.dtype)

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self._linear.rows(ids, self._dtype)
        if self.order is None:
            return rows
        return torch.empty_like(rows).index_copy_(1, self.order.long(), rows)


class OneDNNWeight(Weight):
    """A weight in oneDNN's layout, which does not expose rows."""

    has_rows = False

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__(*values.shape)
        self._nbytes = values.nbytes
        self._packed = torch.ops.mkldnn._reorder_linear_weight(values, ONEDNN_ROWS)

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def product(self, x: Rows, epilogue: Epilogue) -> torch.Tensor:
        y = torch.ops.mkldnn._linear_pointwise(x, self._packed, epilogue.bias, "none", [], "")
        return epilogue.activate(y)

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("oneDNN's layout does not expose rows")


def _onednn_has(dtype: torch.dtype) -> bool:
    """Return whether oneDNN supports packed products of this type on this machine."""
    if not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
