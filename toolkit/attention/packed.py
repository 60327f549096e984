"""Bidirectional attention over packed prompts, without a cache.

PyTorch computes it: in 16 bits on a GPU by its flash attention over the packed prompts, else over
groups of prompts of similar lengths, each padded to its longest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

MIN_LENGTH_RATIO = 0.75
"""Prompts of at least this fraction of the longest one's length are padded to it."""

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LengthGroup:
    """Prompts of similar lengths, padded to the longest."""

    index: torch.Tensor  # [n, longest], packed tokens; padding repeats the last one
    mask: torch.Tensor | None  # [n, 1, 1, longest], False for padding; None: there is none
    real: torch.Tensor  # [num_real], entries of the flattened index that are no padding
    tokens: torch.Tensor  # [num_real], packed tokens of these entries


@dataclass(slots=True)
class PackedBatch:
    """The packed prompts of a step. Tensors are on the device."""

    positions: torch.Tensor  # [num_tokens] int64, position of each token in its prompt
    token_types: torch.Tensor  # [num_tokens] int64, 1 in a prompt's second text, else 0
    starts: torch.Tensor  # [num_prompts + 1] int32
    lengths: IntArray  # [num_prompts], on the host
    groups: list[LengthGroup]  # empty where PyTorch attends over packed prompts

    @classmethod
    def of(
        cls, lengths: IntArray, second_texts: IntArray, device: torch.device, dtype: torch.dtype
    ) -> PackedBatch:
        """`second_texts`: position of the second text in each prompt; 0: none."""
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
    """Attend from every token of a prompt to all of them, scaled by head_size ** -0.5.

    qkv: [num_tokens, 3 · num_heads · head_size]. Returns [num_tokens, num_heads · head_size]."""
    qkv = qkv.view(len(qkv), 3, num_heads, -1)
    if _has_varlen(qkv.device, qkv.dtype):
        from torch.nn.attention.varlen import varlen_attn

        longest = int(batch.lengths.max())
        query, key, value = qkv.unbind(1)
        packed = varlen_attn(query, key, value, batch.starts, batch.starts, longest, longest)
        assert isinstance(packed, torch.Tensor), "no auxiliary output was requested"
        return packed.flatten(1)
    out = torch.empty_like(qkv[:, 0])
    for group in batch.groups:
        query, key, value = qkv[group.index].permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=group.mask)
        out[group.tokens] = attended.transpose(1, 2).flatten(0, 1)[group.real]
    return out.flatten(1)


def _has_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if PyTorch's flash attention supports packed prompts."""
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)


def _groups(lengths: IntArray, starts: IntArray, device: torch.device) -> list[LengthGroup]:
    by_length = np.argsort(-lengths, kind="stable")
    groups = []
    while len(by_length):
        longest = lengths[by_length[0]]
        count = int((lengths[by_length] >= MIN_LENGTH_RATIO * longest).sum())
        which, by_length = by_length[:count], by_length[count:]
        place = np.arange(longest)
        is_real = place < lengths[which, None]
        index = starts[which, None] + np.minimum(place, lengths[which, None] - 1)
        mask = None if is_real.all() else _to(device, is_real[:, None, None, :])
        groups.append(
            LengthGroup(
                _to(device, index),
                mask,
                _to(device, np.flatnonzero(is_real)),
                _to(device, index[is_real]),
            )
        )
    return groups


def _to(device: torch.device, array: npt.NDArray[np.generic]) -> torch.Tensor:
    """Return a copy on the device, without waiting for the device."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
