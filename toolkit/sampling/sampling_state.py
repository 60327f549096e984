"""Sampling parameters of the running requests, one row each, on the host and on the device."""

import numpy as np
import numpy.typing as npt
import torch

from toolkit.hardware.memory import to_device
from toolkit.sampling.params import SamplingParams
from toolkit.sampling.processor_rows import NO_PROCESSORS, Loaded, ProcessorRows
from toolkit.sequence import SequenceSpec

ALL_TOKENS = 2**31 - 1  # more than a context has
MAX_REPETITION = 1e30
"""Repetition penalty from which repeats are impossible; more would exceed fp32."""


class SamplingState:
    """Row r holds the parameters of the request in row r.

    `floats` [num_rows, 6] fp32: temperature, top_p, min_p, repetition, presence and frequency
    penalty. `ints` [num_rows, 3] int64: top_k, seed, number of prompt tokens. `windows`
    [num_rows] int32: number of last tokens that penalties count. All exist on the host and on the
    device."""

    def __init__(
        self, num_rows: int, device: torch.device, processors: Loaded = NO_PROCESSORS
    ) -> None:
        self.device = device
        self.processors = ProcessorRows(num_rows, processors)
        self.host_floats = np.zeros((num_rows, 6), np.float32)
        self.host_ints = np.zeros((num_rows, 3), np.int64)
        self.host_windows = np.zeros(num_rows, np.int32)
        self.floats = torch.zeros(num_rows, 6, device=device)
        self.ints = torch.zeros(num_rows, 3, dtype=torch.int64, device=device)
        self.windows = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.params: list[SamplingParams] = [SamplingParams()] * num_rows
        self.stop_ids: list[list[int]] = [[]] * num_rows
        self.allowed: list[torch.Tensor | None] = [None] * num_rows
        """Tokens that a row may choose, on the device. None: all."""
        self.penalties = np.zeros(num_rows, np.bool_)
        self.biases = np.zeros(num_rows, np.bool_)
        self.num_logprobs = np.full(num_rows, -1, np.int32)

    @property
    def num_prompt_tokens(self) -> npt.NDArray[np.int64]:
        return self.host_ints[:, 2]

    def set(self, row: int, spec: SequenceSpec, seed: int) -> None:
        """Give a row to a request, on the host."""
        p = spec.params
        self.host_floats[row] = (
            p.temperature,
            p.top_p,
            p.min_p,
            min(max(p.repetition_penalty, 1 / MAX_REPETITION), MAX_REPETITION),
            p.presence_penalty,
            p.frequency_penalty,
        )
        self.host_ints[row] = (p.top_k, seed, spec.num_prompt_tokens)
        self.host_windows[row] = ALL_TOKENS if p.penalty_window is None else p.penalty_window
        self.params[row] = p
        self.stop_ids[row] = [*spec.eos_token_ids, *(p.stop_token_ids or ())]
        allowed = p.allowed_token_ids
        self.allowed[row] = to_device(torch.tensor(allowed), self.device) if allowed else None
        self.penalties[row] = p.has_penalties
        self.biases[row] = p.has_biases
        self.processors.set(row, spec)
        self.num_logprobs[row] = -1 if p.logprobs is None else p.logprobs

    def is_special(self, rows: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Return which rows change their logits before sampling."""
        special: npt.NDArray[np.bool_] = (
            self.penalties[rows] | self.biases[rows] | self.processors.asked[rows]
        )
        return special

    def needs_host(self, rows: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Return which rows change their logits by more than penalties."""
        needs: npt.NDArray[np.bool_] = self.biases[rows] | self.processors.asked[rows]
        return needs
