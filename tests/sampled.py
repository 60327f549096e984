"""The sampler on a CPU, for tests: tokens are returned and not written."""

from __future__ import annotations

import numpy as np
import torch

from toolkit.kernels import plain
from toolkit.kernels.table import kernels_for
from toolkit.sampling import sampler
from toolkit.sampling.grammar import Masks
from toolkit.sampling.sampling_state import SamplingState

CPU = torch.device("cpu")


def load_rows(state: SamplingState) -> None:
    """Copy all rows to the device."""
    state.floats.copy_(torch.from_numpy(state.host_floats))
    state.ints.copy_(torch.from_numpy(state.host_ints))
    state.windows.copy_(torch.from_numpy(state.host_windows))


def sample(
    logits: torch.Tensor,
    state: SamplingState,
    token_ids: torch.Tensor,
    rows: np.ndarray,
    lengths: np.ndarray,
    masked: tuple[np.ndarray, Masks] | None = None,
) -> torch.Tensor:
    """Return the next tokens [n] of a CPU. logits: changed in place."""
    there = torch.from_numpy(rows), torch.from_numpy(lengths)
    given = logits, state, token_ids, rows, lengths
    return sampler.sample(*given, kernels_for(CPU), masked, there).long()


def choose(
    logits: torch.Tensor, state: SamplingState, rows: np.ndarray, positions: np.ndarray
) -> torch.Tensor:
    """Return the next tokens [n] of PyTorch's sampler."""
    out = torch.empty(len(rows), dtype=torch.int32)
    there = torch.from_numpy(rows), torch.from_numpy(positions)
    plain.sample(logits, *there, state.floats, state.ints, None, out)
    return out.long()
