"""The part of a file that is transcribed, while its windows run together."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.speech.transcript import WindowText

USUAL_TOKENS = 4.0  # of a second of speech, until the file's own windows show it
MOST_OF_WINDOW = 0.9  # that counts before its end


class SoundDone:
    """Seconds of a file, in whatever order its windows are transcribed.

    A window that runs counts by its tokens, compared with those of the windows that have ended."""

    def __init__(self, lengths: Sequence[float]) -> None:
        """lengths: seconds of the windows."""
        self._lengths, self._tokens = lengths, [0] * len(lengths)
        self._ended = [0.0] * len(lengths)  # seconds of each window that have their text
        self._num_ended_tokens = 0
        self._most = 0.0

    def add(self, index: int, num_tokens: int, ended: WindowText | None) -> None:
        """Note new tokens of a window. ended: a part of it that is complete."""
        self._tokens[index] += num_tokens
        if ended is not None:
            self._ended[index] += ended.end - ended.start
            self._num_ended_tokens += self._tokens[index]
            self._tokens[index] = 0

    @property
    def seconds(self) -> float:
        """An estimate, which never falls, and is right at the end."""
        ended = sum(self._ended)
        rate = max(1.0, self._num_ended_tokens / ended) if ended else USUAL_TOKENS
        running = sum(
            min(tokens / rate, MOST_OF_WINDOW * max(0.0, length - done))
            for length, tokens, done in zip(self._lengths, self._tokens, self._ended, strict=True)
            if tokens
        )
        self._most = min(max(self._most, ended + running), sum(self._lengths))
        return self._most
