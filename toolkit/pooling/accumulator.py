"""Vectors of prompts that run in a decoder, piece by piece, among requests that are continued."""

from __future__ import annotations

import numpy as np
import torch

from toolkit.pooling.pooler import Pooler
from toolkit.scheduler import SchedulerOutput


class PromptPooling:
    """Row r holds what the request in row r has come to so far, when its prompt is pooled."""

    def __init__(
        self, pooler: Pooler, hidden_size: int, num_rows: int, device: torch.device
    ) -> None:
        [self.mode] = pooler.config.modes
        self.pooler = pooler
        self._wanted = np.zeros(num_rows, np.bool_)
        self._kept = torch.zeros(num_rows, hidden_size, device=device)
        """The sum of the hidden states, or the first one; fp32."""

    def apply(self, step: SchedulerOutput) -> None:
        """Takes in who came."""
        for new in step.new_rows:
            self._wanted[new.row] = new.spec.pooling is not None

    def is_wanted(self, step: SchedulerOutput) -> bool:
        """Whether the step's hidden states are needed."""
        return bool(self._wanted[step.rows].any())

    def pool(
        self, step: SchedulerOutput, hidden: torch.Tensor
    ) -> tuple[list[int], torch.Tensor] | None:
        """(indices among the step's samples, vectors [n, size]) of the prompts that end in this step; None when none
        does. hidden: [num_tokens, hidden_size], of the step.
        """
        ends = step.num_tokens.cumsum()
        sample = step.samples.cumsum() - 1
        samples, pooled = [], []
        for index in np.flatnonzero(self._wanted[step.rows]).tolist():
            row, end, computed = (int(a[index]) for a in (step.rows, ends, step.num_computed))
            num_tokens = int(step.num_tokens[index])
            self._add(row, hidden[end - num_tokens : end], is_first=computed == 0)
            if step.samples[index]:
                samples.append(int(sample[index]))
                pooled.append(self._whole(row, computed + num_tokens))
        return (samples, self.pooler.finish(torch.stack(pooled))) if samples else None

    def _add(self, row: int, hidden: torch.Tensor, *, is_first: bool) -> None:
        kept = self._kept[row]
        if self.mode == "mean":
            part = hidden.sum(dim=0, dtype=torch.float32)
            kept.copy_(part if is_first else kept + part)
        elif self.mode == "lasttoken":
            kept.copy_(hidden[-1])
        elif is_first:
            kept.copy_(hidden[0])

    def _whole(self, row: int, num_tokens: int) -> torch.Tensor:
        return self._kept[row] / num_tokens if self.mode == "mean" else self._kept[row].clone()
