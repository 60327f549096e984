"""Products with packed weights: fp32, bfloat16 and int8."""

import ctypes

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
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_INPUT_DTYPES = {
    torch.float32: (torch.float32,),
    torch.bfloat16: (torch.bfloat16,),
    torch.int8: (torch.float32, torch.bfloat16),
}  # types of x by type of the weight
_linear = Kernel("tk_linear", POINTER, POINTER, SIZE, SIZE, POINTER, SIZE)
_rows = Kernel("tk_rows", POINTER, POINTER, SIZE, POINTER, SIZE)
_pack = Kernel("tk_pack", POINTER, SIZE, SIZE, SIZE, POINTER)


class _Weight(ctypes.Structure):
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
    ]


class PackedLinear:
    """y = act(x Wᵀ + b), or act(gate) · up, with a copy of W in the kernels' own layout.

    weight: [out, in] in fp32, bfloat16, or int8 with `scale`, fp32 [out]; bias: [out]; activation:
    a key of ACTIVATIONS; gated: W holds gate's rows, then up's, and y is half as wide."""

    has_rows = True

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        *,
        activation: str | None = None,
        gated: bool = False,
    ) -> None:
        if weight.dim() != 2 or weight.dtype not in KINDS or weight.device.type != "cpu":
            raise ValueError(
                "a weight must be [out, in] in fp32, bfloat16 or int8 on a CPU, not "
                f"{list(weight.shape)} in {weight.dtype} on {weight.device.type}"
            )
        if (weight.dtype == torch.int8) != (scale is not None):
            raise ValueError("a weight must have scales if it is in int8, and only then")
        rows, depth = weight.shape
        if gated and rows % 2:
            raise ValueError(f"gate and up must have as many rows, and {rows} is odd")
        per_word = 4 // weight.element_size()
        # An unpadded weight is not passed to `pad`, which would copy it.
        padded = F.pad(weight, (0, -depth % per_word)) if depth % per_word else weight
        words = padded.contiguous().view(torch.int32)
        width = COLUMNS // 2 if gated else COLUMNS
        self.columns, self.dtypes = rows // 2 if gated else rows, _INPUT_DTYPES[weight.dtype]
        num_panels = -(-self.columns // width)
        self.panels = torch.empty(num_panels, words.shape[1], COLUMNS, dtype=torch.int32)
        use_huge_pages(self.panels.data_ptr(), self.panels.nbytes)
        _pack.run(words.data_ptr(), rows, words.shape[1], gated, self.panels.data_ptr())

        def by_column(values: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
            """Return values [rows] in the order of the panels' columns."""
            if values is None:
                return None
            halves = values.to(dtype).reshape(2 if gated else 1, -1)
            full = F.pad(halves, (0, num_panels * width - self.columns))
            return full.view(len(full), num_panels, width).transpose(0, 1).contiguous()

        # The object keeps the tensors: the structure has only their addresses.
        self._bias = by_column(bias, torch.float32)
        self._scale = by_column(scale, torch.float32)
        total = weight.sum(1, dtype=torch.int32) if scale is not None else None
        self._total = by_column(total, torch.int32)
        addresses = [
            None if part is None else part.data_ptr()
            for part in (self._bias, self._scale, self._total)
        ]
        self._weight = _Weight(
            self.panels.data_ptr(),
            *addresses,
            KINDS[weight.dtype],
            depth,
            words.shape[1],
            self.columns,
            ACTIVATIONS[activation],
            gated,
        )
        self.depth, self._address = depth, ctypes.addressof(self._weight)
        self.nbytes = weight.nbytes

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Map [rows, in] to [rows, out] in `dtype`: fp32 or bfloat16, by default that of x."""
        rows, depth = x.shape
        if depth != self.depth or x.dtype not in self.dtypes:
            raise ValueError(
                f"x must be [rows, {self.depth}] in {self.dtypes}, not {list(x.shape)} in {x.dtype}"
            )
        x = x.contiguous()
        y = torch.empty(rows, self.columns, dtype=dtype or x.dtype)
        _linear.run(
            self._address,
            x.data_ptr(),
            x.dtype == torch.bfloat16,
            rows,
            y.data_ptr(),
            y.dtype == torch.bfloat16,
        )
        return y

    def rows(self, indices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return rows of the weight, [n, in] in `dtype`: fp32 or bfloat16.

        indices: integers [n]; the rows of those out of range are zeros. Raises ValueError for
        gated weights."""
        if self._weight.gated:
            raise ValueError("the rows of a gated weight are not contiguous")
        indices = indices.to(torch.int64).contiguous()
        y = torch.empty(len(indices), self.depth, dtype=dtype)
        _rows.run(
            self._address, indices.data_ptr(), len(indices), y.data_ptr(), dtype == torch.bfloat16
        )
        return y
