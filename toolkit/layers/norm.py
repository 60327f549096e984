"""Norms, and joins: the sums of the residual stream, fused with the norms of the sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from toolkit.distributed import Group, current_group
from toolkit.kernels import cpu, reference
from toolkit.kernels.cpu.norm import DTYPES
from toolkit.kernels.cpu.norm import Join as PackedJoin
from toolkit.kernels.table import kernels_for
from toolkit.weights.slots import Slot, Slots

if TYPE_CHECKING:
    from toolkit.weights.weight import Rows


class Norm(nn.Module):
    """Parameters of an RMS norm (Zhang & Sennrich, 2019) or a layer norm (Ba et al., 2016)."""

    bias: nn.Parameter | None

    def __init__(
        self,
        name: str | None,
        size: int,
        eps: float,
        *,
        is_centered: bool = False,
        has_bias: bool = False,
        offset: float = 0.0,
        factor: float = 1.0,
        is_bare: bool = False,
    ) -> None:
        """`name`: in the checkpoint, None without parameters there. `offset`: added to the stored
        weight, after `factor` multiplies it. is_bare: the weight has the name alone."""
        super().__init__()
        self.name, self.eps, self.is_centered = name, eps, is_centered
        self.offset, self.factor, self.is_bare = offset, factor, is_bare
        # 1 + w is not rounded to 16 bits.
        dtype = torch.float32 if offset or factor != 1.0 else None
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype), requires_grad=False)
        bias = nn.Parameter(torch.zeros(size, dtype=dtype), requires_grad=False)
        self.register_parameter("bias", bias if has_bias else None)

    @property
    def arguments(self) -> reference.Norm:
        """Arguments of the kernels."""
        return reference.Norm(self.weight, self.bias, self.eps, self.is_centered)

    def slots(self) -> Slots:
        if self.name is None:
            return {}
        name = self.name if self.is_bare else f"{self.name}.weight"
        slots: Slots = {name: Slot(self.weight, offset=self.offset, factor=self.factor)}
        if self.bias is not None:
            slots[f"{self.name}.bias"] = Slot(self.bias)
        return slots


class Join(nn.Module):
    """(norms of the sum, sum), where sum = factor · (residual + scale · post(x + other)).

    All are [num_tokens, size]. `other`: a second product that is added. The sum is written into
    `residual`; without one, x is the sum. Under tensor parallelism x and other are row-parallel
    products: the ranks' parts are summed here, in the same kernel where that is fastest."""

    factor: nn.Parameter | None

    def __init__(
        self,
        size: int,
        norms: Sequence[Norm],
        post: Norm | None = None,
        scale: float = 1.0,
        factor: str | None = None,
    ) -> None:
        """`factor`: name in the checkpoint. None: 1."""
        super().__init__()
        self._factor_name = factor
        one = None if factor is None else nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_parameter("factor", one)
        self.size, self.norms, self.scale = size, nn.ModuleList(norms), scale
        self.post = post
        self.group, self.dtype = current_group(), torch.get_default_dtype()
        self.packed: PackedJoin | None = None  # computes it on a CPU
        self.arguments = tuple(norm.arguments for norm in norms)
        self._post = None if post is None else post.arguments

    @property
    def is_plain(self) -> bool:
        """True for one norm of a plain sum."""
        is_sum = self._post is None and self.scale == 1.0 and self.factor is None
        return len(self.arguments) == 1 and is_sum

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        other: torch.Tensor | None = None,
        *,
        rounds: bool = False,
    ) -> tuple[Sequence[Rows], torch.Tensor]:
        """rounds: the only norm may be `Rounded`."""
        if residual is not None and self.group.size > 1:
            if other is not None:
                x, other = x + other, None
            if self.group.peer_memory is not None and self.is_plain:
                both = self.group.peer_memory.all_reduce_norm(x, residual, self.arguments[0])
                if both is not None:
                    return [both[0]], both[1]
            x = self.group.all_reduce(x)
        if self.packed is not None:
            return self.packed(x, residual, other)
        scales = x.new_empty((len(x), 1), dtype=torch.float32) if rounds else None
        join = kernels_for(x.device).join
        if residual is None:
            norms, total = join(x, None, self.arguments, row_scales=scales)
        else:
            norms, total = join(
                x,
                residual,
                self.arguments,
                other=other,
                post=self._post,
                scale=self.scale,
                factor=self.factor,
                row_scales=scales,
            )
        if scales is None:
            return norms, total
        (values,) = norms
        return [reference.Rounded(values, scales, x.dtype)], total

    def pack(self) -> None:
        """Prepare the CPU kernel, if there is one. Called once, after loading."""
        if cpu.available() and self.dtype in DTYPES:
            factor = 1.0 if self.factor is None else float(self.factor)
            self.packed = PackedJoin(self.size, self.arguments, self._post, self.scale, factor)

    def slots(self) -> Slots:
        if self._factor_name is None or self.factor is None:
            return {}
        return {self._factor_name: Slot(self.factor)}


def norm_over_ranks(rows: torch.Tensor, weight: torch.Tensor, eps: float, group: Group) -> None:
    """Apply an RMS norm in place to rows of which each rank has an equal part.

    Several ranks may have the same part. rows: [num_tokens, size], may be strided."""
    if group.size == 1:
        kernels_for(rows.device).rms_norm_rows(rows, weight, eps)
        return
    wide = rows.float()
    squares = group.all_reduce(wide.square().sum(1, keepdim=True))
    rows.copy_(wide * torch.rsqrt(squares / (group.size * len(weight)) + eps) * weight.float())
