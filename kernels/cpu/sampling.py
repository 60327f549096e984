"""The choice of tokens from logits."""

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
    """Return the next tokens `[n]` int64, as `kernels.plain.sample` does.

    -1: the logits are not finite. logits: fp32 `[n, vocab]`; rows: int32 `[n]`, the requests' rows
    of `floats` and `ints` (`toolkit.sampling.sampling_state`); positions: int32 `[n]`, of the new
    tokens. Raises ValueError for others."""
    n, vocab = logits.shape
    types = [tensor.dtype for tensor in (logits, rows, positions, floats, ints)]
    if types != [torch.float32, torch.int32, torch.int32, torch.float32, torch.int64]:
        raise ValueError(
            "logits and floats must be in float32, rows and positions in int32, and ints in int64, "
            f"not {types}"
        )
    if (
        (floats.shape[1], ints.shape[1]) != (6, 3)
        or (len(rows), len(positions)) != (n, n)
        or not vocab
    ):
        raise ValueError(
            "rows and positions must have one entry per row of logits, floats 6 columns, and ints 3"
        )
    if not all(tensor.is_contiguous() for tensor in (logits, rows, positions, floats, ints)):
        raise ValueError("logits, rows, positions, floats and ints must be contiguous")
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
