"""Text of answers, and their segments by timestamp tokens."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from toolkit.speech.tokens import SpeechTokens

LEAST_PART = 1.0  # seconds of a window that is finished in parts
LEAST_REST = 0.2  # seconds of a rest that may have speech


@dataclass(frozen=True, slots=True)
class Segment:
    """A phrase. Times are seconds of the file."""

    start: float
    end: float
    text: str
    tokens: list[int]  # with the timestamps around it


class SpeechText:
    """Incremental decoder of an answer: returns complete characters only.

    Special tokens and timestamps are no text, whatever the tokenizer says about them."""

    def __init__(self, token_bytes: Mapping[int, bytes], tokens: SpeechTokens) -> None:
        self._bytes, self._end = token_bytes, tokens.end
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_ids: Sequence[int], *, is_last: bool = False) -> str:
        """Return the characters that these tokens complete; of the last ones, the rest as well."""
        found = b"".join(self._bytes[token] for token in token_ids if token < self._end)
        return self._decoder.decode(found, final=is_last)


def split_segments(
    token_ids: Sequence[int],
    tokens: SpeechTokens,
    token_bytes: Mapping[int, bytes],
    start: float,
    seconds: float,
) -> list[Segment]:
    """Return the segments of a window's answer.

    Two timestamps in succession separate segments. Text after the last pair is a segment that ends
    with the window, unless one timestamp follows it. start: time of the window. seconds: its
    length, which bounds all times. Segments without text are left out."""
    text = SpeechText(token_bytes, tokens)
    parts = list(_parts([one for one in token_ids if one != tokens.end], tokens))
    found: list[Segment] = []
    for index, part in enumerate(parts):
        times = [min(tokens.seconds(one), seconds) for one in part if one >= tokens.first_timestamp]
        begins_with_time = bool(part) and part[0] >= tokens.first_timestamp
        first = times[0] if begins_with_time else found[-1].end - start if found else 0.0
        last = times[-1] if len(times) > begins_with_time else seconds
        words = text.add(part, is_last=index == len(parts) - 1)
        if words.strip():
            found.append(Segment(start + first, start + max(first, last), words, part))
    return found


def finished_seconds(token_ids: Sequence[int], tokens: SpeechTokens, seconds: float) -> float:
    """Return how far a window is transcribed: its length, unless its end cuts off a phrase.

    The model then ends the answer with the time at which this phrase begins, after the time at
    which the one before it ends."""
    first = tokens.first_timestamp
    if len(token_ids) < 2 or min(token_ids[-2:]) < first:
        return seconds
    found = tokens.seconds(token_ids[-1])
    return found if LEAST_PART <= found <= seconds - LEAST_REST else seconds


def _parts(token_ids: Sequence[int], tokens: SpeechTokens) -> Iterator[list[int]]:
    """Yield the tokens of each segment: they are cut between two timestamps."""
    part: list[int] = []
    for token in token_ids:
        if part and token >= tokens.first_timestamp and part[-1] >= tokens.first_timestamp:
            yield part
            part = []
        part.append(token)
    if part:
        yield part
