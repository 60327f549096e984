"""Prompt lookup on a GPU: `speculative.ngram` in a kernel, as the last part of a step."""

from __future__ import annotations

from typing import Protocol

import torch

from toolkit.config import Speculation
from toolkit.hardware.memory import to_device
from toolkit.kernels.drafts import Points
from toolkit.kernels.table import Kernels
from toolkit.sampling.sampling_state import SamplingState
from toolkit.scheduler import NewRow


class RowState(Protocol):
    """The rows' tokens (`worker.gpu.cuda_state.CudaBatchState`)."""

    token_ids: torch.Tensor  # [num_rows, max_len + 1]
    row_lengths: torch.Tensor  # [num_rows]
    sampling: SamplingState


class DeviceLookup:
    """Writes drafts after the tokens of requests that sampled. It can be captured."""

    def __init__(self, config: Speculation, kernels: Kernels, state: RowState) -> None:
        self._config, self._look_up = config, kernels.look_up_drafts
        num_rows, width = state.token_ids.shape
        device = state.token_ids.device
        self._predictions = torch.zeros(num_rows, width, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._predicted: set[int] = set()
        """Rows with a prediction."""
        self.drafts = torch.full(
            (num_rows, config.num_speculative_tokens), -1, dtype=torch.int32, device=device
        )
        """The drafts of the requests of the last step, padded with -1."""

    def place(self, new: NewRow) -> None:
        """Give a row to a request."""
        prediction = (new.spec.prediction_token_ids or [])[: self._predictions.shape[1]]
        if prediction:
            tokens = torch.tensor(prediction, dtype=torch.int32)
            self._predictions[new.row, : len(tokens)] = to_device(tokens, self._predictions.device)
        if prediction or new.row in self._predicted:
            self._lengths[new.row] = len(prediction)
        (self._predicted.add if prediction else self._predicted.discard)(new.row)

    def propose(self, points: Points, when: int, rows: torch.Tensor, state: RowState) -> None:
        """Draft for the requests whose end is `when` (`kernels.drafts`)."""
        self._look_up(
            points,
            when,
            rows,
            state.token_ids,
            state.row_lengths,
            state.sampling.ints[:, 2],
            self._predictions,
            self._lengths,
            self.drafts[: len(rows)],
            self._config.prompt_lookup_min,
            self._config.prompt_lookup_max,
        )
