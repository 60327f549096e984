"""Special tokens of transcriptions (Radford et al., 2022, arXiv:2212.04356, figure 1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

Task = Literal["transcribe", "translate"]
SECONDS_PER_TIMESTAMP = 0.02


class SpeechTokens(msgspec.Struct, kw_only=True, frozen=True):
    """Ids of a model's special tokens.

    Text has the ids before `end`. Timestamps are the ids from `first_timestamp` on, of multiples of
    0.02 s."""

    end: int  # <|endoftext|>
    start: int  # <|startoftranscript|>
    previous: int  # <|startofprev|>: the text before the clip follows
    no_speech: int  # <|nospeech|> or <|nocaptions|>
    no_timestamps: int  # <|notimestamps|>
    first_timestamp: int  # <|0.00|>
    languages: dict[str, int] = {}
    """Tokens of languages by code, such as `en`; empty: the model knows English alone."""
    transcribe: int = -1  # -1, as `translate`: the model knows English alone
    translate: int = -1
    suppressed: tuple[int, ...] = ()  # tokens that no answer has
    first_suppressed: tuple[int, ...] = ()  # tokens with which no answer begins
    most_initial_timestamp: int = 50
    """Latest timestamp with which an answer begins, in steps of 0.02 s."""

    @property
    def is_multilingual(self) -> bool:
        return bool(self.languages)

    def prompt(
        self,
        language: str | None = None,
        task: Task = "transcribe",
        *,
        timestamps: bool = False,
        previous: Sequence[int] = (),
    ) -> list[int]:
        """Return the tokens before an answer. previous: tokens of text before the clip.

        language: a key of `languages`; unused if the model knows English alone."""
        ids = [self.previous, *previous, self.start] if previous else [self.start]
        if self.is_multilingual:
            ids.append(self.languages[language or "en"])
            ids.append(self.transcribe if task == "transcribe" else self.translate)
        return ids if timestamps else [*ids, self.no_timestamps]

    def asks_for_timestamps(self, prompt: Sequence[int]) -> bool:
        """Return True if an answer to the prompt has timestamps. The start asks for a language."""
        asks_for_language = self.is_multilingual and prompt[-1] == self.start
        return prompt[-1] != self.no_timestamps and not asks_for_language

    def may_begin(self, token_ids: Iterable[int]) -> bool:
        """Return True if an answer with timestamps may begin with one of these tokens."""
        first = self.first_timestamp
        return any(first <= one <= first + self.most_initial_timestamp for one in token_ids)

    def seconds(self, token: int) -> float:
        """Return the time of a timestamp, from the clip's beginning."""
        return (token - self.first_timestamp) * SECONDS_PER_TIMESTAMP


class HearingInfo(msgspec.Struct, kw_only=True, frozen=True):
    """Tokens and limits of a model that hears, found at start-up."""

    tokens: SpeechTokens
    seconds: float = 30.0  # longest clip
    alignment_heads: tuple[tuple[int, int], ...] = ()
    """(layer, head) of the cross-attention that follows the words."""
