"""Products with packed integer weights of 4 or 8 bits, with a scale for each group of a row."""

import torch
import torch.nn.functional as F

from toolkit.kernels.cpu.library import POINTER, SIZE, Kernel
from toolkit.kernels.cpu.product import COLUMNS, Product

BITS = {4: 3, 8: 4}  # kinds in weight.h
GROUP_UNIT = 16  # divides the columns of a group, unless there is one group per row
_ROW_UNIT = 32  # divides the padded columns of a row of one group
_SCALE_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_groups = Kernel("tk_groups", POINTER, POINTER, SIZE, SIZE, POINTER, SIZE)
_rows = Kernel("tk_group_rows", POINTER, POINTER, SIZE, POINTER, SIZE)
_pack = Kernel("tk_pack_groups", POINTER, POINTER, POINTER, POINTER, POINTER)


class PackedGroups(Product):
    """A product with scales · (values - 2 ** (bits - 1)), or scales · values + offsets.

    values: uint8 [out, in] of 8 bits, or [out, in / 2] of 4 bits, the even column in the low half;
    scales and offsets: [out, groups], fp32, bfloat16 or fp16, and kept so; bias: [out]. Products
    round x to 8 bits, with a scale for every 32 elements, or 16."""

    product_kernel, rows_kernel = _groups, _rows

    def __init__(
        self,
        values: torch.Tensor,
        scales: torch.Tensor,
        offsets: torch.Tensor | None,
        bits: int,
        bias: torch.Tensor | None = None,
        *,
        activation: str | None = None,
        gated: bool = False,
    ) -> None:
        if values.dim() != 2 or values.dtype != torch.uint8 or values.device.type != "cpu":
            raise ValueError(
                "values must be uint8 [out, columns] on a CPU, not "
                f"{list(values.shape)} in {values.dtype} on {values.device.type}"
            )
        if bits not in BITS:
            raise ValueError(f"values must have 4 or 8 bits, not {bits}")
        rows, depth = len(values), values.shape[1] * 8 // bits
        numbers = [scales] if offsets is None else [scales, offsets]
        num_groups = scales.shape[-1]
        group = depth // max(num_groups, 1)
        if any(part.shape != (rows, num_groups) for part in numbers) or group * num_groups != depth:
            raise ValueError(
                f"scales and offsets must be [{rows}, groups] with groups that divide {depth}, "
                f"not {' and '.join(str(list(part.shape)) for part in numbers)}"
            )
        if group % GROUP_UNIT and num_groups > 1:
            raise ValueError(f"a group must be a multiple of {GROUP_UNIT} columns, not {group}")
        if num_groups == 1:
            group = -(-depth // _ROW_UNIT) * _ROW_UNIT
            values = F.pad(values, (0, (group - depth) * bits // 8)) if group != depth else values
        dtype = torch.promote_types(scales.dtype, numbers[-1].dtype)
        if dtype not in _SCALE_KINDS:
            raise ValueError(f"scales must be in fp32, bfloat16 or fp16, not {dtype}")
        numbers = [part.to(dtype).contiguous() for part in numbers]
        words = num_groups * group * bits // 32
        number_words = COLUMNS * num_groups * len(numbers) * dtype.itemsize // 4
        super().__init__(
            (rows, depth),
            words,
            words * COLUMNS + number_words,
            bias,
            activation,
            gated,
            (torch.float32, torch.bfloat16),
        )
        self.struct.kind, self.struct.group = BITS[bits], group
        self.struct.scale_kind = _SCALE_KINDS[dtype]
        self.struct.has_offsets = offsets is not None
        values = values.contiguous()
        addresses = [part.data_ptr() for part in numbers]
        _pack.run(
            self.address,
            values.data_ptr(),
            addresses[0],
            addresses[1] if offsets is not None else None,
            self.panels.data_ptr(),
        )
        self.nbytes = self.panels.nbytes + (0 if self._bias is None else self._bias.nbytes)
