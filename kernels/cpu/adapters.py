"""Ends of products with LoRA adapters: act(sums + B A x), each token with its own A and B."""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from toolkit.kernels.cpu.library import POINTER, SIZE, Kernel
from toolkit.kernels.cpu.product import Product

_adapt = Kernel("tk_adapt", POINTER, POINTER, POINTER, POINTER, POINTER, SIZE)


class _Part(ctypes.Structure):
    """Mirror of `Part` in adapters.cpp."""

    _fields_ = [  # ctypes wants a list
        ("low", POINTER),
        ("up", POINTER),
        ("rank", SIZE),
        ("first", SIZE),
        ("rows", SIZE),
    ]


class _Slot(ctypes.Structure):
    """Mirror of `Slot` in adapters.cpp."""

    _fields_ = [("parts", POINTER), ("num_parts", SIZE)]  # ctypes wants a list


class _Step(ctypes.Structure):
    """Mirror of `Step` in adapters.cpp."""

    _fields_ = [  # ctypes wants a list
        ("all", POINTER),
        ("wanted", POINTER),
        ("num_tokens", SIZE),
    ]


class _Adapted(ctypes.Structure):
    """Mirror of `Adapted` in adapters.cpp."""

    _fields_ = [  # ctypes wants a list
        ("slots", POINTER),
        ("step", POINTER),
        ("depth", SIZE),
        ("columns", SIZE),
        ("activation", SIZE),
        ("gated", SIZE),
        ("sums_stride", SIZE),
        ("low_stride", SIZE),
        ("x_bf16", SIZE),
        ("y_bf16", SIZE),
    ]


class StepSlots:
    """The adapter of each token of a step, by slot, at a fixed address. 0: none."""

    def __init__(self) -> None:
        self._struct = _Step()
        self.address = ctypes.addressof(self._struct)
        self._arrays: dict[str, npt.NDArray[np.int32]] = {}

    def set(self, slots: npt.NDArray[np.int32], wanted: npt.NDArray[np.int32]) -> None:
        """`wanted`: slots of the tokens that the end of the last layer computes."""
        for name, given in (("all", slots), ("wanted", wanted)):
            own = self._arrays[name] = np.ascontiguousarray(given, np.int32)
            setattr(self._struct, name, own.ctypes.data)
        self._struct.num_tokens = len(slots)


class Part(NamedTuple):
    """An adapter's factors of some rows of a weight, in fp32."""

    first: int  # row of the weight
    low: torch.Tensor  # A, [rank, columns of the weight]
    up: torch.Tensor  # transposed B, [rank, rows]


class AdaptedProduct:
    """A product, and adapters that are placed in slots from 1 to `num_slots`."""

    def __init__(self, product: Product, step: StepSlots, num_slots: int, max_ranks: int) -> None:
        """max_ranks: of all parts of an adapter."""
        self._product, self._step, self._max_ranks = product, step, max_ranks
        self._slots = (_Slot * (1 + num_slots))()
        self._placed: dict[int, tuple[Any, Sequence[Part]]] = {}  # memory of the slots
        self._structs: dict[tuple[torch.dtype, torch.dtype], _Adapted] = {}

    def place(self, slot: int, parts: Sequence[Part]) -> None:
        """Replace the adapter of a slot.

        Raises ValueError for factors that are not contiguous or not of the weight's shape."""
        rows = self._product.num_rows
        for first, low, up in parts:
            if (
                not (low.is_contiguous() and up.is_contiguous())
                or low.dtype != torch.float32
                or up.dtype != torch.float32
                or low.shape != (len(up), self._product.depth)
                or not 0 <= first <= first + up.shape[1] <= rows
            ):
                raise ValueError(f"the factors do not fit a weight of {rows} rows")
        if sum(len(part.low) for part in parts) > self._max_ranks:
            raise ValueError(f"an adapter of this weight has at most {self._max_ranks} ranks")
        structs = (_Part * len(parts))(
            *(
                _Part(low.data_ptr(), up.data_ptr(), len(up), first, up.shape[1])
                for first, low, up in parts
            )
        )
        self._slots[slot] = _Slot(ctypes.addressof(structs), len(parts))
        self._placed[slot] = structs, parts

    def __call__(self, x: torch.Tensor, own_x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the product in `dtype`: fp32 or bfloat16. x, own_x: [rows, in], which the adapters
        and the weight multiply."""
        x = x.contiguous()
        sums = self._product.raw_sums(own_x, torch.float32)
        struct = self._structs.get((x.dtype, dtype))
        if struct is None:
            struct = self._structs[x.dtype, dtype] = self._struct(sums.shape[1], x.dtype, dtype)
        low = torch.empty(len(x), self._max_ranks, dtype=torch.float32)
        y = torch.empty(len(x), struct.columns, dtype=dtype)
        _adapt.run(
            ctypes.addressof(struct),
            x.data_ptr(),
            sums.data_ptr(),
            low.data_ptr(),
            y.data_ptr(),
            len(x),
        )
        return y

    def _struct(self, stride: int, x_dtype: torch.dtype, dtype: torch.dtype) -> _Adapted:
        product = self._product.struct
        return _Adapted(
            slots=ctypes.addressof(self._slots),
            step=self._step.address,
            depth=product.depth,
            columns=product.columns,
            activation=product.activation,
            gated=product.gated,
            sums_stride=stride,
            low_stride=self._max_ranks,
            x_bf16=x_dtype == torch.bfloat16,
            y_bf16=dtype == torch.bfloat16,
        )
