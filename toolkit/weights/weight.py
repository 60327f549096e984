"""The interface of weights: one class for each format that weights are multiplied in.

A new format is a subclass with all methods that follow, listed in `quantization.METHODS`. Layers
have no branches on formats."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from toolkit.distributed import Shard
from toolkit.kernels import reference
from toolkit.weights.groups import Decoded
from toolkit.weights.slots import QuantizedSlot, Slot

if TYPE_CHECKING:
    from toolkit.kernels.triton.products.lora import Factors
    from toolkit.kernels.triton.products.matmul import Unscaled
    from toolkit.weights.formats import Packing

    Rows = torch.Tensor | Unscaled | reference.Rounded

ALL = slice(None)
DUMMY_STD = 0.02
_FINISHED = "a finished weight has products only"


class Epilogue(NamedTuple):
    """The end of a product. Norms are fused by `Weight.add_norm`."""

    bias: torch.Tensor | None = None  # one per row of the weight
    activation: str | None = None  # a kind of `activation`
    gated: bool = False  # act(first half of the rows) · second half
    dtype: torch.dtype | None = None  # of the result on a CPU. None: that of the input's rows
    out: torch.Tensor | None = None  # buffer for the result on a GPU
    factors: Factors | None = None  # LoRA adapters on a GPU, if `Weight.adds_deltas`

    def activate(self, y: torch.Tensor) -> torch.Tensor:
        """Return what follows the bias, by PyTorch."""
        if self.gated:
            y, up = y.chunk(2, dim=1)
        if self.activation is not None:
            y = reference.ACTIVATIONS[self.activation](y)
        if self.gated:
            y = y * up
        return y if self.dtype is None else y.to(self.dtype)


class Stored(nn.Module, abc.ABC):
    """A matrix [rows, columns] that is filled through its slots."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.shape = rows, columns

    @property
    @abc.abstractmethod
    def nbytes(self) -> int: ...

    def part_slots(
        self,
        rows: slice,
        shards: tuple[Shard, Shard],
        *,
        transpose: bool = False,
        order: tuple[int, ...] | None = None,
    ) -> dict[str, Slot]:
        """Return the slots of some rows, by the ends of their tensors' names.

        shards: of a checkpoint's rows and columns. The rest is as in `Slot`."""
        raise NotImplementedError(_FINISHED)

    def write(self, rows: slice, decoded: Decoded) -> None:
        """Copy rows from a quantized checkpoint."""
        raise NotImplementedError(_FINISHED)

    def fill_randomly(self, generator: torch.Generator) -> None:
        """Fill with normal random numbers of a standard deviation of DUMMY_STD."""
        raise NotImplementedError(_FINISHED)


class StackableWeight(Stored):
    """A matrix that may hold those of all experts of a layer, one after the other."""

    @abc.abstractmethod
    def stack(self, count: int) -> reference.Stack:
        """Return views of the weights of so many experts."""

    def holds(self, packing: Packing) -> bool:
        """Return True if `part_slots` are those of what the packing stores, as it is."""
        return False

    def arrange_stack(self, count: int) -> None:
        """Put the weights of so many experts in the order of the kernels, in place."""


class Weight(Stored):
    """A matrix [rows, columns] that x [num_tokens, columns] is multiplied by.

    It is filled through its slots, then `finish` replaces it by the layout of the device. That may
    have products only, and rows if `has_rows`."""

    has_rows = True  # supports `take`

    @abc.abstractmethod
    def product(self, x: Rows, epilogue: Epilogue) -> torch.Tensor:
        """Return act(x Wᵀ + b), or act(gate) · up."""

    @property
    def adds_deltas(self) -> bool:
        """True if products add the adapters of `Epilogue.factors`."""
        return False

    def fuses_norm(self, num_tokens: int) -> bool:
        """Return True if products of so many rows support `add_norm`, and `Unscaled` rows."""
        return False

    def add_norm(
        self,
        x: torch.Tensor,
        epilogue: Epilogue,
        residual: torch.Tensor,
        norm: reference.Norm,
        square_sums: torch.Tensor,
    ) -> Unscaled:
        """Return the RMS norm of product + residual, which is written into `residual`.

        square_sums: fp64 zeros [len(x)] of this call alone. Needs `fuses_norm`."""
        raise NotImplementedError(f"{type(self).__name__} fuses no norms")

    def reads_rounded(self, num_tokens: int) -> bool:
        """Return True if products of so many rows take them as `Rounded`."""
        return False

    def rounded_product(self, x: Rows, epilogue: Epilogue) -> Rows:
        """Return `product` for one that `reads_rounded`: `Rounded` if this weight supports that."""
        return self.product(x, epilogue)

    @abc.abstractmethod
    def take(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows [len(ids), columns] in the type of the model."""

    def take_shard(self, ids: torch.Tensor, shard: Shard) -> torch.Tensor:
        """Return rows of the shard that this weight is, and zeros for ids outside of it."""
        own = ids - shard.begin
        is_own = (own >= 0) & (own < shard.count)
        return self.take(own.where(is_own, 0)).masked_fill(~is_own[:, None], 0.0)

    # Until `finish`

    def dequantize(self, rows: slice = ALL) -> torch.Tensor:
        """Return rows in fp32."""
        raise NotImplementedError(_FINISHED)

    def multiply(self, factor: float, rows: slice = ALL) -> None:
        """Multiply rows by a power of two, in place."""
        raise NotImplementedError(_FINISHED)

    def rebased(self, weight: Weight) -> Weight:
        """Return this weight after `weight` has taken the place of what it was made from."""
        return weight

    def finish(self, epilogue: Epilogue) -> Weight:
        """Return the weight in the layout that is fastest for products with this end."""
        return self


def parameter(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class QuantizingWeight(Weight):
    """A weight whose slots quantize what they are filled with."""

    def part_slots(
        self,
        rows: slice,
        shards: tuple[Shard, Shard],
        *,
        transpose: bool = False,
        order: tuple[int, ...] | None = None,
    ) -> dict[str, Slot]:
        target = next(self.parameters()).new_empty(1).expand(self.shape)[rows]
        first = rows.start or 0
        slot = QuantizedSlot(target, transpose, shards, order, store=self.store, first=first)
        return {"weight": slot}

    @abc.abstractmethod
    def store(self, rows: slice, weight: torch.Tensor) -> None:
        """Quantize rows of the weight."""
