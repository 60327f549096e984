"""Products with packed weights: fp32, bfloat16 and int8."""

import torch
import torch.nn.functional as F

from toolkit.kernels.cpu.library import POINTER, SIZE, Kernel
from toolkit.kernels.cpu.product import ACTIVATIONS, COLUMNS, Product

__all__ = ["ACTIVATIONS", "KINDS", "PackedLinear"]

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_INPUT_DTYPES = {
    torch.float32: (torch.float32,),
    torch.bfloat16: (torch.bfloat16,),
    torch.int8: (torch.float32, torch.bfloat16),
}  # types of x by type of the weight
_linear = Kernel("tk_linear", POINTER, POINTER, SIZE, SIZE, POINTER, SIZE)
_rows = Kernel("tk_rows", POINTER, POINTER, SIZE, POINTER, SIZE)
_pack = Kernel("tk_pack", POINTER, SIZE, SIZE, SIZE, POINTER)


class PackedLinear(Product):
    """A product with a weight [out, in] in fp32, bfloat16, or int8 with `scale`, fp32 [out].

    bias: [out]"""

    product_kernel, rows_kernel = _linear, _rows

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
        per_word = 4 // weight.element_size()
        # An unpadded weight is not passed to `pad`, which would copy it.
        padded = F.pad(weight, (0, -depth % per_word)) if depth % per_word else weight
        values = padded.contiguous().view(torch.int32)
        words = values.shape[1]
        dtypes = _INPUT_DTYPES[weight.dtype]
        super().__init__((rows, depth), words, words * COLUMNS, bias, activation, gated, dtypes)
        self.struct.kind = KINDS[weight.dtype]
        _pack.run(values.data_ptr(), rows, words, gated, self.panels.data_ptr())
        if scale is not None:
            self._scale = self.by_column(scale, torch.float32)
            self._total = self.by_column(weight.sum(1, dtype=torch.int32), torch.int32)
            self.struct.scale = self._scale.data_ptr()
            self.struct.total = self._total.data_ptr()
        self.nbytes = weight.nbytes + (0 if scale is None else scale.nbytes)
