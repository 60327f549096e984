"""Pooling in a decoder: prompts run in chunks, among requests that generate."""

import numpy as np
import torch

from toolkit.pooling.pooler import Pooler
from toolkit.scheduler import SchedulerOutput


class PromptPooling:
    """Pooling state per row: the sum of hidden states so far, or a single one."""

    def __init__(
        self, pooler: Pooler, hidden_size: int, num_rows: int, device: torch.device
    ) -> None:
        [self.mode] = pooler.config.modes
        self.pooler = pooler
        self._is_pooled = np.zeros(num_rows, np.bool_)
        self._state = torch.zeros(num_rows, hidden_size, device=device)  # fp32

    def apply(self, step: SchedulerOutput) -> None:
        """Record which of the new rows are pooled."""
        for new in step.new_rows:
            self._is_pooled[new.row] = new.spec.pooling is not None

    def is_needed(self, step: SchedulerOutput) -> bool:
        """Return whether the step's hidden states are needed."""
        return bool(self._is_pooled[step.rows].any())

    def pool(
        self, step: SchedulerOutput, hidden: torch.Tensor
    ) -> tuple[list[int], torch.Tensor] | None:
        """Return (indices among the step's samples, vectors [n, size]) of prompts that end here.

        None if no prompt ends in this step. hidden: [num_tokens, hidden_size]."""
        ends = step.num_tokens.cumsum()
        sample = step.samples.cumsum() - 1
        samples, pooled = [], []
        for index in np.flatnonzero(self._is_pooled[step.rows]).tolist():
            row, end, computed = (int(a[index]) for a in (step.rows, ends, step.num_computed))
            num_tokens = int(step.num_tokens[index])
            self._add(row, hidden[end - num_tokens : end], is_first=computed == 0)
            if step.samples[index]:
                samples.append(int(sample[index]))
                pooled.append(self._result(row, computed + num_tokens))
        return (samples, self.pooler.finish(torch.stack(pooled))) if samples else None

    def _add(self, row: int, hidden: torch.Tensor, *, is_first: bool) -> None:
        state = self._state[row]
        if self.mode == "mean":
            part = hidden.sum(dim=0, dtype=torch.float32)
            state.copy_(part if is_first else state + part)
        elif self.mode == "lasttoken":
            state.copy_(hidden[-1])
        elif is_first:
            state.copy_(hidden[0])

    def _result(self, row: int, num_tokens: int) -> torch.Tensor:
        return self._state[row] / num_tokens if self.mode == "mean" else self._state[row].clone()
