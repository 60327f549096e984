"""Integers packed into words, and their canonical layout."""

from __future__ import annotations

import torch

from toolkit.weights.groups import Groups, pack_nibbles
from toolkit.weights.layout import Layout


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the integers in int32 words [rows, n] as uint8 [rows, n · 32 / bits].

    The lowest bits are first. Integers of 3 bits may cross from a word into the next."""
    if bits == 3:  # three words have 32 integers
        words = words.reshape(len(words), -1, 3).long() & 0xFFFFFFFF
        low, middle, high = words.unbind(2)
        low, high = low | (middle & 0xFFFF) << 32, middle >> 16 | high << 16
        shifts = torch.arange(0, 48, 3, device=words.device)
        halves = torch.stack([low, high], dim=2).unsqueeze(-1) >> shifts
        return (halves & 7).to(torch.uint8).flatten(1)
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    values: torch.Tensor = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return values.to(torch.uint8).flatten(1)


def zero_points(words: torch.Tensor, bits: int, offset: int) -> torch.Tensor:
    """Return the zero points in words [n, m], of which `offset` (0 or 1) was subtracted."""
    if bits == 3:  # from each, as they cross words
        return (unpack(words, 3) + offset) & 7
    # From all zero points of a word at once: 0 borrows from the next.
    return unpack(words + offset * sum(1 << i for i in range(0, 32, bits)), bits)


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
    if bits < 4 and not layout.offset_type:
        values = values + (8 - 2 ** (bits - 1))  # to int4's zero point
    if layout.bits == 4:
        values = pack_nibbles(values)
    dtype = getattr(torch, layout.scale_type)
    order = None if order is None else order.int()
    return Groups(layout.bits, values.contiguous(), scales.to(dtype), offsets, order)
