"""The interface of products with packed weights, which all their formats share."""

import ctypes
from typing import ClassVar

import torch
import torch.nn.functional as F

from toolkit.kernels.cpu.library import POINTER, SIZE, Kernel, use_huge_pages

ACTIVATIONS = {
    kind: number
    for number, kind in enumerate(
        (None, "silu", "relu", "gelu", "gelu_tanh", "relu2", "gelu_quick")
    )
}
COLUMNS = 32  # columns of y in a panel


class WeightStruct(ctypes.Structure):
    """Mirror of `Weight` in weight.h."""

    _fields_ = [  # ctypes wants a list
        ("panels", POINTER),
        ("bias", POINTER),
        ("scale", POINTER),
        ("total", POINTER),
        ("kind", SIZE),
        ("depth", SIZE),
        ("words", SIZE),
        ("columns", SIZE),
        ("activation", SIZE),
        ("gated", SIZE),
        ("panel_words", SIZE),
        ("group", SIZE),
        ("scale_kind", SIZE),
        ("has_offsets", SIZE),
    ]


class Product:
    """y = act(x Wᵀ + b), or act(gate) · up, with a copy of W in the kernels' own layout.

    activation: a key of ACTIVATIONS; gated: W holds gate's rows, then up's, and y is half as wide.
    A subclass fills `panels`, `nbytes` and its fields of `struct`."""

    has_rows = True
    nbytes: int
    product_kernel: ClassVar[Kernel]
    rows_kernel: ClassVar[Kernel]

    def __init__(
        self,
        shape: tuple[int, int],
        words: int,
        panel_words: int,
        bias: torch.Tensor | None,
        activation: str | None,
        gated: bool,
        dtypes: tuple[torch.dtype, ...],
    ) -> None:
        """shape: of W; words: of one of its rows; dtypes: of x."""
        rows, self.depth = shape
        if gated and rows % 2:
            raise ValueError(f"gate and up must have as many rows, and {rows} is odd")
        self.num_rows, self.dtypes = rows, dtypes
        self.columns = rows // 2 if gated else rows
        self._width = COLUMNS // 2 if gated else COLUMNS
        self._gated = gated
        self.panels = torch.empty(-(-self.columns // self._width), panel_words, dtype=torch.int32)
        use_huge_pages(self.panels.data_ptr(), self.panels.nbytes)
        # The object keeps the tensors: the structure has only their addresses.
        self._bias = None if bias is None else self.by_column(bias, torch.float32)
        self.struct = WeightStruct(
            panels=self.panels.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            depth=self.depth,
            words=words,
            columns=self.columns,
            activation=ACTIVATIONS[activation],
            gated=gated,
            panel_words=panel_words,
        )
        self.address = ctypes.addressof(self.struct)
        self._sums: WeightStruct | None = None  # for `sums`

    def by_column(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return values of W's rows in the order of the panels' columns."""
        halves = values.to(dtype).reshape(2 if self._gated else 1, -1)
        num_panels = len(self.panels)
        full = F.pad(halves, (0, num_panels * self._width - self.columns))
        return full.view(len(full), num_panels, self._width).transpose(0, 1).contiguous()

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Map [rows, in] to [rows, out] in `dtype`: fp32 or bfloat16, by default that of x."""
        return self._run(self.struct, x, dtype)

    def sums(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Map [rows, in] to x Wᵀ + b without activation and gate, [rows, rows of W]."""
        y = self.raw_sums(x, dtype)
        if not self._gated:
            return y
        halves = y.view(len(y), len(self.panels), 2, self._width).transpose(1, 2)
        return halves.reshape(len(y), 2, -1)[:, :, : self.columns].reshape(len(y), -1)

    def raw_sums(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return `sums`. If gated, in panels: half of each panel's columns are gate's."""
        if self._sums is None:
            # The same panels, with all of their columns side by side.
            self._sums = WeightStruct.from_buffer_copy(self.struct)
            self._sums.activation, self._sums.gated = ACTIVATIONS[None], 0
            if self._gated:
                self._sums.columns = len(self.panels) * COLUMNS
        return self._run(self._sums, x, dtype)

    def _run(
        self, struct: WeightStruct, x: torch.Tensor, dtype: torch.dtype | None
    ) -> torch.Tensor:
        if x.shape[1] != self.depth or x.dtype not in self.dtypes:
            raise ValueError(
                f"x must be [rows, {self.depth}] in {self.dtypes}, not {list(x.shape)} in {x.dtype}"
            )
        x = x.contiguous()
        y = torch.empty(len(x), struct.columns, dtype=dtype or x.dtype)
        self.product_kernel.run(
            ctypes.addressof(struct),
            x.data_ptr(),
            x.dtype == torch.bfloat16,
            len(x),
            y.data_ptr(),
            y.dtype == torch.bfloat16,
        )
        return y

    def rows(self, indices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return rows of the weight, [n, in] in `dtype`: fp32 or bfloat16.

        indices: integers [n]; the rows of those out of range are zeros. Raises ValueError for
        gated weights."""
        if self._gated:
            raise ValueError("the rows of a gated weight are not contiguous")
        indices = indices.to(torch.int64).contiguous()
        y = torch.empty(len(indices), self.depth, dtype=dtype)
        self.rows_kernel.run(
            self.address, indices.data_ptr(), len(indices), y.data_ptr(), dtype == torch.bfloat16
        )
        return y
