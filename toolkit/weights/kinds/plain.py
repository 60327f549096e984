"""Weights in the type of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from toolkit.distributed import Shard
from toolkit.kernels import reference
from toolkit.kernels.table import TritonKernels, triton_kernels_for
from toolkit.weights.groups import Decoded
from toolkit.weights.kinds.packed import pack
from toolkit.weights.slots import Slot
from toolkit.weights.weight import ALL, DUMMY_STD, Epilogue, StackableWeight, Weight, parameter

if TYPE_CHECKING:
    from toolkit.kernels.triton.products.matmul import Unscaled
    from toolkit.weights.weight import Rows


def plain_weight(rows: int, columns: int) -> PlainWeight:
    """Return an uninitialized weight on the default device, in the default dtype."""
    values = torch.empty(rows, columns)
    kernels = triton_kernels_for(values.device)
    return PlainWeight(values) if kernels is None else GPUWeight(values, kernels)


class PlainWeight(Weight, StackableWeight):
    """A weight that PyTorch multiplies, unless it is packed for a CPU."""

    def __init__(self, values: torch.Tensor) -> None:
        """values: [rows, columns]"""
        super().__init__(*values.shape)
        self.values = parameter(values)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def product(self, x: Rows, epilogue: Epilogue) -> torch.Tensor:
        assert isinstance(x, torch.Tensor), "see fuses_norm"
        return epilogue.activate(F.linear(x, self.values, epilogue.bias))

    def stack(self, count: int) -> reference.Stack:
        return reference.Stack(self.values.view(count, -1, self.shape[1]))

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.values)

    def part_slots(
        self,
        rows: slice,
        shards: tuple[Shard, Shard],
        *,
        transpose: bool = False,
        order: tuple[int, ...] | None = None,
    ) -> dict[str, Slot]:
        return {"weight": Slot(self.values[rows], transpose, shards, order)}

    def write(self, rows: slice, decoded: Decoded) -> None:
        if not isinstance(decoded, torch.Tensor):
            decoded = decoded.dequantize()
        self.values[rows].copy_(decoded)

    def fill_randomly(self, generator: torch.Generator) -> None:
        self.values.normal_(0.0, DUMMY_STD, generator=generator)

    def dequantize(self, rows: slice = ALL) -> torch.Tensor:
        return self.values[rows].float()

    def multiply(self, factor: float, rows: slice = ALL) -> None:
        self.values[rows].mul_(factor)

    def finish(self, epilogue: Epilogue) -> Weight:
        return pack(self.values.detach(), None, epilogue, self.values.dtype) or self


class GPUWeight(PlainWeight):
    """A weight that our kernels or cuBLAS multiply."""

    adds_deltas = True

    def __init__(self, values: torch.Tensor, kernels: TritonKernels) -> None:
        super().__init__(values)
        self.kernels = kernels

    def product(self, x: Rows, epilogue: Epilogue) -> torch.Tensor:
        assert not isinstance(x, reference.Rounded), "see reads_rounded"
        bias, activation, gated, _, out, factors = epilogue
        return self.kernels.product(
            x, self.values, bias, activation, gated=gated, out=out, factors=factors
        )

    def fuses_norm(self, num_tokens: int) -> bool:
        return self.kernels.fuses_norm(num_tokens, self.values)

    def add_norm(
        self,
        x: torch.Tensor,
        epilogue: Epilogue,
        residual: torch.Tensor,
        norm: reference.Norm,
        square_sums: torch.Tensor,
    ) -> Unscaled:
        assert epilogue.activation is None
        return self.kernels.product_add_norm(
            x,
            self.values,
            residual,
            norm.weight,
            norm.eps,
            square_sums,
            epilogue.bias,
            epilogue.factors,
        )

    def take_shard(self, ids: torch.Tensor, shard: Shard) -> torch.Tensor:
        return self.kernels.embed_shard(ids, self.values, shard.begin, shard.count)

    def finish(self, epilogue: Epilogue) -> Weight:
        return self
