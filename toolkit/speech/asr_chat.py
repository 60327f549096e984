"""Transcribe windows with a model that hears in conversations and writes `language English`, a
marker token and the text, as Qwen3-ASR does."""

from __future__ import annotations

import codecs
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from itertools import repeat
from typing import Any

from toolkit.speech.clip import Clip
from toolkit.speech.languages import language_code, language_name
from toolkit.speech.transcriber import Answer, Part, TranscriptionOptions
from toolkit.speech.transcript import WindowText
from toolkit.speech.windows import TimedClip

MARKER = "<asr_text>"
"""Token between the language and the text."""
SECONDS = 60.0
"""Longest window."""
LANGUAGES = (
    "zh", "en", "yue", "ar", "de", "fr", "es", "pt", "id", "it", "ko", "ru", "th", "vi", "ja", "tr",
    "hi", "ms", "nl", "sv", "da", "fi", "pl", "cs", "tl", "fa", "el", "ro", "hu", "mk",
)  # fmt: skip
"""Codes of the languages that Qwen3-ASR knows."""
_NAMES = {"tl": "Filipino"}  # that differ from `language_name`
_WORD = "language"


class ASRChat:
    """Implements `Listener`. All windows have the same prompt."""

    def __init__(
        self,
        answer: Answer,
        prompt_token_ids: Sequence[int],
        marker: int,
        token_bytes: Mapping[int, bytes],
        options: TranscriptionOptions,
    ) -> None:
        """prompt_token_ids: a conversation with one clip; if the options have a language,
        `language_header` is its end. marker: id of MARKER. token_bytes: text of each token."""
        self._answer, self._prompt, self._options = answer, list(prompt_token_ids), options
        self._marker, self._bytes = marker, token_bytes
        self.language = options.language

    async def start(self, clip: Clip) -> None:
        """Do nothing: answers begin with the language."""

    async def transcribe(
        self, window: TimedClip, previous: Sequence[int]
    ) -> AsyncGenerator[Part, None]:
        start, clip = window
        options = self._options
        params = options.sampling(options.temperature, has_logprobs=options.has_logprobs)
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        language = options.language
        header: list[tuple[int, float]] | None = [] if language is None else None
        said: list[tuple[int, float]] = []  # tokens of the text, and their log-probabilities
        text = ""
        async with aclosing(self._answer(self._prompt, clip, params)) as parts:
            async for part in parts:
                added = ""
                chosen = repeat(0.0) if part.logprobs is None else part.logprobs.chosen()
                for token in zip(part.token_ids, chosen, strict=False):
                    if token[0] == self._marker:
                        if header is not None:
                            language = _language_in(self._spelled(header))
                        header = None
                    elif header is not None:
                        header.append(token)
                    elif spelled := self._bytes[token[0]]:  # special tokens are no text
                        said.append(token)
                        added += decoder.decode(spelled)
                text += added
                yield Part(added, num_tokens=len(part.token_ids), language=language)
        rest = decoder.decode(b"", final=True)
        if header is not None and not _is_header(beginning := self._spelled(header)):
            said = [token for token in header if self._bytes[token[0]]]
            rest = beginning
        yield Part(
            rest,
            WindowText(
                start=start,
                end=start + clip.seconds,
                text=text + rest,
                tokens=[token for token, _ in said],
                logprobs=[logprob for _, logprob in said] if options.has_logprobs else (),
                temperature=options.temperature,
                language=language,
            ),
            language=language,
        )

    def _spelled(self, tokens: Sequence[tuple[int, float]]) -> str:
        return b"".join(self._bytes[token] for token, _ in tokens).decode(errors="replace")


def _language_in(header: str) -> str | None:
    """Return the code of the first language of `language Chinese,English`; None if unknown."""
    _, _, names = header.strip().partition(" ")
    return language_code(names.partition(",")[0].strip())


def _is_header(text: str) -> bool:
    """Return True for a header, complete or cut off, of an answer without the marker.

    That is one without speech, or with too few tokens. Other text was said."""
    word, _, names = text.strip().partition(" ")
    *others, last = (name.strip() for name in names.split(","))
    known = ("None", *map(_name, LANGUAGES))
    if word != _WORD:
        return not names and _WORD.startswith(word)
    return set(others) <= set(known) and any(one.startswith(last) for one in known)


def conversation(prompt: str) -> list[dict[str, Any]]:
    """Return the messages before an answer. prompt: text about the sound, such as names in it."""
    return [
        {"role": "system", "content": prompt.strip()},
        {"role": "user", "content": [{"type": "audio"}]},
    ]


def language_header(code: str) -> str:
    """Return the beginning of an answer in a language, without the marker."""
    return f"{_WORD} {_name(code)}"


def _name(code: str) -> str:
    return _NAMES.get(code) or language_name(code).title()
