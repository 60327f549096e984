"""The sampling parameters of the running requests, one row each: tensors on the device, flags on the host."""

from __future__ import annotations

import numpy as np
import torch

from toolkit.sampling.params import SamplingParams


class SamplingState:
    """Row r holds the parameters of the request in row r.

    `floats` [num_rows, 6]: temperature, top_p, min_p, repetition, presence and frequency penalty. `ints`
    [num_rows, 3]: top_k, seed, number of prompt tokens.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.device = device
        self.floats = torch.zeros(num_rows, 6, device=device)
        self.ints = torch.zeros(num_rows, 3, dtype=torch.int64, device=device)
        self.params: list[SamplingParams] = [SamplingParams()] * num_rows
        self.stop_ids: list[list[int]] = [[]] * num_rows
        self.num_prompt_tokens = np.zeros(num_rows, np.int32)
        self.random = np.zeros(num_rows, np.bool_)
        self.filters = np.zeros(num_rows, np.bool_)
        self.penalties = np.zeros(num_rows, np.bool_)
        self.biases = np.zeros(num_rows, np.bool_)
        self.num_logprobs = np.full(num_rows, -1, np.int32)

    def set(
        self, row: int, params: SamplingParams, seed: int, num_prompt_tokens: int, eos_token_ids: list[int]
    ) -> None:
        """Gives a row to a request."""
        p = params
        self.floats[row] = torch.tensor(
            [p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty]
        )
        self.ints[row] = torch.tensor([p.top_k, seed, num_prompt_tokens])
        self.params[row] = params
        self.stop_ids[row] = [*eos_token_ids, *(params.stop_token_ids or ())]
        self.num_prompt_tokens[row] = num_prompt_tokens
        self.random[row] = p.temperature > 0
        self.filters[row] = p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)
        self.penalties[row] = p.has_penalties
        self.biases[row] = bool(p.logit_bias) or p.min_tokens > 0
        self.num_logprobs[row] = -1 if p.logprobs is None else p.logprobs
