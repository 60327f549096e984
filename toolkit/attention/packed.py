"""Attention in both directions over whole prompts, packed one after another, without a cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

ALIKE = 0.75
"""Prompts at least this share of the longest one's length are padded to it and computed together."""

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Group:
    """Prompts of similar lengths. `index` [n, longest]: where their tokens are among the packed ones; what pads a prompt
    is its last token again, which `mask` [n, 1, 1, longest] leaves out (None: there is none). `real` [num_real]: the
    places in the flattened index that are no padding, and `tokens` [num_real] which tokens those are.
    """

    index: torch.Tensor
    mask: torch.Tensor | None
    real: torch.Tensor
    tokens: torch.Tensor


@dataclass(slots=True)
class PackedBatch:
    """The prompts of a step. On the device: `positions` and `token_types` [num_tokens] int64, each token's place in its
    prompt and which of the prompt's two texts it belongs to; `starts` [num_prompts + 1] int32. On the host: `lengths`.
    """

    positions: torch.Tensor
    token_types: torch.Tensor
    starts: torch.Tensor
    lengths: IntArray
    groups: list[Group]

    @classmethod
    def of(
        cls, lengths: IntArray, second_texts: IntArray, device: torch.device, dtype: torch.dtype
    ) -> PackedBatch:
        """`second_texts`: where the second text begins in each prompt; 0: there is none."""
        starts = np.concatenate(([0], lengths.cumsum()))
        prompt = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(starts[-1]) - starts[prompt]
        second = second_texts[prompt]
        types = ((second > 0) & (positions >= second)).astype(np.int64)
        return cls(
            positions=_to(device, positions),
            token_types=_to(device, types),
            starts=_to(device, starts.astype(np.int32)),
            lengths=lengths,
            groups=[] if _has_varlen(device, dtype) else _groups(lengths, starts[:-1], device),
        )


def attend(qkv: torch.Tensor, batch: PackedBatch, num_heads: int) -> torch.Tensor:
    """Every token of a prompt attends to all of them, scaled by head_size ** -0.5.

    qkv: [num_tokens, 3 · num_heads · head_size], queries, keys and values. Returns [num_tokens, num_heads · head_size].
    """
    qkv = qkv.view(len(qkv), 3, num_heads, -1)
    if _has_varlen(qkv.device, qkv.dtype):
        from torch.nn.attention.varlen import varlen_attn

        longest = int(batch.lengths.max())
        query, key, value = qkv.unbind(1)
        packed = varlen_attn(query, key, value, batch.starts, batch.starts, longest, longest)
        assert isinstance(packed, torch.Tensor), "no auxiliary output was asked for"
        return packed.flatten(1)
    out = torch.empty_like(qkv[:, 0])
    for group in batch.groups:
        query, key, value = qkv[group.index].permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=group.mask)
        out[group.tokens] = attended.transpose(1, 2).flatten(0, 1)[group.real]
    return out.flatten(1)


def _has_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether PyTorch's flash attention takes packed prompts as they are."""
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)


def _groups(lengths: IntArray, starts: IntArray, device: torch.device) -> list[Group]:
    by_length = np.argsort(-lengths, kind="stable")
    groups = []
    while len(by_length):
        longest = lengths[by_length[0]]
        count = int((lengths[by_length] >= ALIKE * longest).sum())
        which, by_length = by_length[:count], by_length[count:]
        place = np.arange(longest)
        is_real = place < lengths[which, None]
        index = starts[which, None] + np.minimum(place, lengths[which, None] - 1)
        mask = None if is_real.all() else _to(device, is_real[:, None, None, :])
        groups.append(
            Group(
                _to(device, index),
                mask,
                _to(device, np.flatnonzero(is_real)),
                _to(device, index[is_real]),
            )
        )
    return groups


def _to(device: torch.device, array: npt.NDArray[np.generic]) -> torch.Tensor:
    """A copy on the device, without waiting for the device's work."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
