"""Rules of transcriptions on logits, in NumPy: PyTorch's threads would wait for those of the other
kernels at each token."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toolkit.kernels import reference
from toolkit.kernels.reference import SpeechRules


def speech_rules(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    ints: Tensor,
    rules: SpeechRules,
) -> None:
    """Compute `kernels.reference.speech_rules`."""
    if logits.dtype != torch.float32:  # NumPy has no bfloat16
        reference.speech_rules(logits, rows, positions, token_ids, ints, rules)
        return
    tokens, prompts = token_ids.numpy(), ints.numpy()[:, 2]
    for scores, row, length in zip(logits.numpy(), rows.tolist(), positions.tolist(), strict=True):
        prompt = int(prompts[row])
        prompt_end = tokens[row, max(0, prompt - 1)]
        if length < 0 or prompt_end == rules.start:
            continue
        scores[rules.ids[length == prompt].numpy()] = -np.inf
        if prompt_end != rules.no_timestamps:
            _apply_timestamp_rules(scores, tokens[row, prompt:length], rules)


def _apply_timestamp_rules(
    scores: NDArray[np.float32], answer: NDArray[np.int32], rules: SpeechRules
) -> None:
    """Apply the rules of timestamps to the logits that follow an answer's tokens."""
    first = rules.first_timestamp
    text, times = scores[:first], scores[first:]
    is_time = answer >= first
    after_time = bool(is_time[-1:].any())
    ends_pair = after_time and bool(is_time[-2:].all())
    opens_pair = after_time and not ends_pair

    if ends_pair:
        times[:] = -np.inf
    if is_time.any():
        times[: answer[is_time][-1] - first + (not opens_pair)] = -np.inf
    if not len(answer):
        times[rules.last_initial_timestamp + 1 - first :] = -np.inf
    text[rules.no_timestamps] = -np.inf
    if opens_pair:
        text[: rules.end] = -np.inf
    if not len(answer) or _log_sum_exp(times) > text.max():
        text[:] = -np.inf


def _log_sum_exp(x: NDArray[np.float32]) -> float:
    most = x.max()
    return float(most + np.log(np.exp(x - most).sum())) if np.isfinite(most) else float(most)
