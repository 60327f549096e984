"""Integers packed into words, and their canonical layout."""

from __future__ import annotations

import torch

from toolkit.weights.groups import Groups, pack_nibbles
from toolkit.weights.layout import Layout


def unpack(words: torch.Tensor, bits: int, dim: int = 1) -> torch.Tensor:
    """Return the integers in int32 words as uint8, the lowest bits first, along `dim`."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    values: torch.Tensor = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return values.to(torch.uint8).movedim(-1, dim + 1).flatten(dim, dim + 1)


def sorted_columns(groups: torch.Tensor, size: int, *, has_order: bool) -> torch.Tensor | None:
    """Return the columns by group, or None if they are in order.

    groups: of each column. Raises ValueError if a group has another size, or if columns are not in
    order and `has_order` is not set."""
    order = torch.argsort(groups, stable=True)
    first = 0 if has_order else groups[:1] if len(groups) else 0
    expected = torch.arange(len(groups), device=groups.device) // size
    in_order = groups[order] if has_order else groups
    if not torch.equal((in_order - first).long(), expected):
        raise ValueError(f"g_idx does not have groups of {size} columns, as config.json has")
    return order if has_order else None


def by_group(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, groups: torch.Tensor
) -> torch.Tensor:
    """Return scales · (values - zeros) in fp32 [rows, columns].

    values: [rows, columns]; scales and zeros: [rows, all groups]; groups: of the columns."""
    groups = groups.long()
    if len(groups) and not 0 <= int(groups.min()) <= int(groups.max()) < scales.shape[1]:
        raise ValueError(f"g_idx names groups that are not among its {scales.shape[1]}")
    return scales[:, groups] * (values.float() - zeros[:, groups].float())


def from_zero_points(
    bits: int,
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    order: torch.Tensor | None,
    layout: Layout,
) -> Groups:
    """Return the weight scales · (values - zeros). Without zeros they are 2 ** (bits - 1).

    values: uint8 [rows, columns]; scales (fp32) and zeros: [rows, groups]. Raises ValueError if
    the layout has no offsets, and the zeros need them."""
    if order is not None:
        values = values[:, order]
    offsets = None
    if layout.offset_type:
        assert zeros is not None
        offsets = -scales * zeros
    elif zeros is not None and bool((zeros != 2 ** (bits - 1)).any()):
        raise ValueError("zero points differ from those of a symmetric format")
    if bits == 4:
        values = pack_nibbles(values)
    dtype = getattr(torch, layout.scale_type)
    order = None if order is None else order.int()
    return Groups(bits, values.contiguous(), scales.to(dtype), offsets, order)
