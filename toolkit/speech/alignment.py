"""Times of words, from the weights with which tokens attend to a clip.

Some heads of the cross-attention follow the words. Their weights, normalized and smoothed, are a
matrix of tokens by frames; the cheapest monotonic path through it gives each token its time
(Radford et al., arXiv:2212.04356, section 4.7; dynamic time warping: Sakoe and Chiba, 1978)."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FRAME = 0.02  # seconds of a frame of the encoder
_MEDIAN = 7  # frames of the filter
_MIDDLE = _MEDIAN // 2
_EXCHANGES = (
    *((0, 5), (0, 3), (1, 6), (2, 4), (0, 1), (3, 5), (2, 6)),
    *((2, 3), (3, 6), (4, 5), (1, 4), (1, 3), (3, 4)),
)
"""Pairs that are put in order, one after the other: the middle one of seven is then the median."""
_DIAGONAL, _DOWN, _RIGHT = 0, 1, 2  # steps of a path: to the next token and frame, token, frame
_PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
_BEFORE_WORDS = "\"'“¡¿([{-"
_AFTER_WORDS = "\"'.。,，!！?？:：”)]}、"

Floats = npt.NDArray[np.float32]
Span = tuple[float, float]  # begin and end in seconds


@dataclass(frozen=True, slots=True)
class TimedWord:
    """A word of a clip, with its spaces and punctuation. Times are seconds of the clip."""

    text: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class _Part:
    """Text of the tokens from `first` to before `stop`."""

    text: str
    first: int
    stop: int

    def __add__(self, later: _Part) -> _Part:
        return _Part(self.text + later.text, self.first, later.stop)


def token_spans(weights: Floats, first_row: int, num_tokens: int) -> list[Span]:
    """Return the time of each of `num_tokens` tokens.

    weights: of the alignment heads, `[heads, rows, frames]`, cut to the frames of the clip without
    padding. A row is a position of the text with the prompt before it and the end token after it,
    and stands for the token that it predicts: `first_row`, the prompt's last one, for the first
    token, and the last token's row for the end. All rows are part of the normalization, as in
    Whisper's own code."""
    if not num_tokens or not weights.shape[2]:
        return [(0.0, 0.0)] * num_tokens
    weights = _divided(weights, weights.sum(axis=2, keepdims=True))
    differences = weights - weights.mean(axis=1, keepdims=True)
    normal = _divided(differences, weights.std(axis=1, keepdims=True))
    matrix = median_filter(normal[:, first_row : first_row + num_tokens + 1]).mean(axis=0)
    tokens, frames = find_path(-matrix.astype(np.float64))
    begins = frames[np.diff(tokens, prepend=-1) > 0] * FRAME
    return list(zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True))


def _divided(values: Floats, by: Floats) -> Floats:
    divisors: Floats = np.where(by > 0, by, 1).astype(np.float32)
    return values / divisors


def time_words(
    token_ids: Sequence[int],
    spans: Sequence[Span],
    token_bytes: Mapping[int, bytes],
    *,
    has_spaces: bool = True,
) -> list[TimedWord]:
    """Return the words of an answer's text tokens. spans: times of the tokens.

    has_spaces: the language separates words by spaces; else each character is a word."""
    parts = list(_characters(token_ids, token_bytes))
    if has_spaces:
        parts = list(_at_spaces(parts))
    return [
        TimedWord(part.text, spans[part.first][0], spans[part.stop - 1][1])
        for part in _with_punctuation(parts)
    ]


def median_filter(values: Floats) -> Floats:
    """Return the median of seven entries of the last dimension around each, mirrored at the ends.

    Fewer than four entries are returned as they are."""
    count = values.shape[-1]
    if count <= _MIDDLE:
        return values
    padding = [(0, 0)] * (values.ndim - 1) + [(_MIDDLE, _MIDDLE)]
    padded = np.pad(values, padding, mode="reflect")
    around = [padded[..., shift : shift + count] for shift in range(_MEDIAN)]
    for low, high in _EXCHANGES:
        one, other = around[low], around[high]
        around[low], around[high] = np.minimum(one, other), np.maximum(one, other)
    return around[_MIDDLE]


def find_path(
    costs: npt.NDArray[np.float64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the cheapest path through costs [rows, columns]: a row and a column of each entry.

    It begins at the first entry, ends at the last, and goes to the next row, column or both. Costs
    of all entries on a diagonal follow from the two diagonals before it. As in Whisper's own code,
    a step is to the next column unless another is cheaper than both others, and sums are in
    fp32."""
    num_rows, num_columns = costs.shape
    flat = np.ascontiguousarray(costs).reshape(-1)
    steps = np.empty((num_rows + 1, num_columns + 1), np.int8)
    flat_steps = steps.reshape(-1)
    # Sums by row, of the last diagonal and the one before; row and column 0 are outside.
    earlier = np.full(num_rows + 1, np.inf, np.float32)
    sums = earlier.copy()
    earlier[0] = 0
    for diagonal in range(2, num_rows + num_columns + 1):
        first, last = max(1, diagonal - num_columns), min(num_rows, diagonal - 1)
        before = slice(first - 1, last)
        both, down, right = earlier[before], sums[before], sums[first : last + 1]
        is_both = (both < down) & (both < right)
        is_down = (down < both) & (down < right)
        least = np.where(is_both, both, np.where(is_down, down, right))
        begin = (first - 1) * num_columns + diagonal - first - 1
        own = flat[begin :: num_columns - 1 or 1][: last - first + 1]
        places = slice(first * num_columns + diagonal, last * num_columns + diagonal + 1)
        chosen = np.where(is_both, _DIAGONAL, np.where(is_down, _DOWN, _RIGHT))
        flat_steps[places][::num_columns] = chosen
        earlier, sums = sums, np.full(num_rows + 1, np.inf, np.float32)
        sums[first : last + 1] = own + least
    return _trace(steps)


def _trace(steps: npt.NDArray[np.int8]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return rows and columns of the path to the last entry. Row and column 0 are outside."""
    steps[0, :], steps[:, 0] = _RIGHT, _DOWN
    row, column = steps.shape[0] - 1, steps.shape[1] - 1
    path = []
    while row or column:
        path.append((row - 1, column - 1))
        step = steps[row, column]
        row, column = row - (step != _RIGHT), column - (step != _DOWN)
    rows, columns = np.array(path[::-1], np.int64).T
    return rows, columns


def _characters(token_ids: Sequence[int], token_bytes: Mapping[int, bytes]) -> Iterator[_Part]:
    """Yield runs of tokens as short as possible that end with a complete character."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    first, text = 0, ""
    for index, token in enumerate(token_ids):
        text += decoder.decode(token_bytes[token], final=index == len(token_ids) - 1)
        if not decoder.getstate()[0]:
            yield _Part(text, first, index + 1)
            first, text = index + 1, ""


def _at_spaces(parts: Sequence[_Part]) -> Iterator[_Part]:
    """Yield parts that begin with a space or are punctuation, with the other parts after them."""
    word: _Part | None = None
    for part in parts:
        begins = part.text.startswith(" ") or part.text.strip() in _PUNCTUATION
        if word is None or begins:
            if word is not None:
                yield word
            word = part
        else:
            word += part
    if word is not None:
        yield word


def _with_punctuation(words: Sequence[_Part]) -> list[_Part]:
    """Return words with the punctuation before and after them."""
    opened: list[_Part] = []  # the last word first
    for word in reversed(words):
        is_opening = word.text.startswith(" ") and word.text.strip() in _BEFORE_WORDS
        if opened and is_opening:
            opened[-1] = word + opened[-1]
        else:
            opened.append(word)
    closed: list[_Part] = []
    for word in reversed(opened):
        if closed and not closed[-1].text.endswith(" ") and word.text in _AFTER_WORDS:
            closed[-1] += word
        else:
            closed.append(word)
    return closed
