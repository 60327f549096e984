"""Positions of tokens on several axes, where pictures have rows and columns (mRoPE)."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from toolkit.sequence import Feature

Ints = npt.NDArray[np.int64]


def axis_positions(features: Sequence[Feature]) -> Ints:
    """Return the positions [3, n] of a prompt's tokens up to the end of the last feature.

    Text moves on along all axes. A picture's tokens have the time of its first, and rows and
    columns from there on; text goes on after the larger of these (Qwen2-VL, arXiv:2409.12191,
    section 2.1.2)."""
    parts: list[Ints] = []
    at = token = 0
    for feature in features:
        rows, columns = feature.grid
        grid = np.stack((np.zeros((rows, columns)), *np.indices((rows, columns)))).reshape(3, -1)
        done = 0
        for begin, count in feature.runs:
            text = np.arange(begin - token)
            parts.append(np.broadcast_to(at + text, (3, len(text))))
            at += len(text)
            parts.append(at + grid[:, done : done + count].astype(np.int64))
            done, token = done + count, begin + count
        at += max(rows, columns)
    return np.concatenate(parts, axis=1) if parts else np.empty((3, 0), np.int64)


def shift_after(features: Sequence[Feature]) -> int:
    """Return the position of a token after all features, less its index in the prompt."""
    return sum(max(feature.grid) - feature.num_rows for feature in features)
