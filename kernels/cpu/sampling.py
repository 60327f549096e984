"""Choosing tokens from logits."""

from __future__ import annotations

import torch

from toolkit.kernels.cpu.library import POINTER, SIZE, Kernel

_sample = Kernel("tk_sample", POINTER, SIZE, SIZE, POINTER, POINTER, POINTER, POINTER, POINTER)


def sample(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    floats: torch.Tensor,
    ints: torch.Tensor,
) -> torch.Tensor:
    """The next tokens `[n]` int64; -1 where the logits are not finite. Chosen as `toolkit.sampling.sampler`
    has it.

    logits: fp32 `[n, vocab]`; rows and positions: int32 `[n]`, which rows of `floats` and `ints`
    (`toolkit.sampling.sampling_state`) the requests have and where their tokens come. Raises ValueError for others.
    """
    n, vocab = logits.shape
    types = [tensor.dtype for tensor in (logits, rows, positions, floats, ints)]
    if types != [torch.float32, torch.int32, torch.int32, torch.float32, torch.int64]:
        raise ValueError(
            f"logits and what they are sampled with have other types than these: {types}"
        )
    if (
        (floats.shape[1], ints.shape[1]) != (6, 3)
        or (len(rows), len(positions)) != (n, n)
        or not vocab
    ):
        raise ValueError("logits and what they are sampled with are of other shapes")
    if not all(tensor.is_contiguous() for tensor in (logits, rows, positions, floats, ints)):
        raise ValueError("logits and what they are sampled with are contiguous")
    tokens = torch.empty(n, dtype=torch.int64)
    _sample.run(
        logits.data_ptr(),
        n,
        vocab,
        rows.data_ptr(),
        positions.data_ptr(),
        floats.data_ptr(),
        ints.data_ptr(),
        tokens.data_ptr(),
    )
    return tokens
