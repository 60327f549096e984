"""Find a model's special tokens of transcriptions in its folder.

Those of generation_config.json come first. Older checkpoints lack some of them: they are found by
their names in the tokenizer, and their settings in config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

from toolkit.errors import CheckpointError
from toolkit.files import parse_json
from toolkit.gguf.folder import read_file
from toolkit.speech.tokens import SECONDS_PER_TIMESTAMP, HearingInfo, SpeechTokens

_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
_NO_SPEECH = ("<|nospeech|>", "<|nocaptions|>")
_SMALLEST_MULTILINGUAL = 51865
"""Tokens of a model that knows several languages. Tokenizers name languages in any case."""
_MAX_INITIAL_TIMESTAMP = 50


def find_speech_tokens(folder: Path) -> HearingInfo:
    """Return the special tokens of a folder's model, and what else it says about hearing.

    Raises CheckpointError if some are missing or wrong."""
    return _Finder(folder).find()


class _Finder:
    """The files of a folder that have special tokens."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._config = self._read("config.json")
        self._settings = {**self._config, **self._read("generation_config.json")}
        self._names = self._added_tokens()
        self._vocab_size = self._number("vocab_size", 0)

    def find(self) -> HearingInfo:
        no_timestamps = self._id("no_timestamps_token_id", "<|notimestamps|>")
        start = self._id("decoder_start_token_id", "<|startoftranscript|>")
        languages = self._languages(start)
        tasks = self._tasks() if languages else {}
        tokens = SpeechTokens(
            end=self._id("eos_token_id", "<|endoftext|>"),
            start=start,
            # Transformers counts from <|notimestamps|>, too: all models have this order.
            previous=self._id("prev_sot_token_id", "<|startofprev|>", no_timestamps - 2),
            no_speech=self._id("", _NO_SPEECH, no_timestamps - 1),
            no_timestamps=no_timestamps,
            first_timestamp=self._checked(no_timestamps + 1, "<|0.00|>"),
            languages=languages,
            transcribe=tasks.get("transcribe", -1),
            translate=tasks.get("translate", -1),
            suppressed=self._ids("suppress_tokens"),
            first_suppressed=self._ids("begin_suppress_tokens"),
            most_initial_timestamp=self._number(
                "max_initial_timestamp_index", _MAX_INITIAL_TIMESTAMP
            ),
        )
        seconds = self._number("max_source_positions", 1500) * SECONDS_PER_TIMESTAMP
        return HearingInfo(tokens=tokens, seconds=seconds, alignment_heads=self._heads())

    def _languages(self, start: int) -> dict[str, int]:
        """Return the tokens of languages by code; none if the model knows English alone."""
        given = self._settings.get("lang_to_id") or {}
        is_multilingual = self._settings.get("is_multilingual")
        if is_multilingual is None:
            is_multilingual = bool(given) or self._vocab_size >= _SMALLEST_MULTILINGUAL
        if not is_multilingual:
            return {}
        if not isinstance(given, Mapping):
            raise self._wrong("lang_to_id", given, "an object of ids by token")
        found = {
            code[1]: self._checked(id, name)
            for name, id in (given or self._names).items()
            if (code := _LANGUAGE.fullmatch(name))
        }
        if not found:
            raise CheckpointError(
                f"{self._folder}: the model knows several languages, and neither "
                f"generation_config.json nor the tokenizer lists their tokens, such as <|en|>. "
                f"Fetch them again."
            )
        return found

    def _tasks(self) -> dict[str, int]:
        given = self._settings.get("task_to_id") or {}
        if not isinstance(given, Mapping):
            raise self._wrong("task_to_id", given, "an object of ids by task")
        return {
            task: self._checked(given[task], task) if task in given else self._id("", f"<|{task}|>")
            for task in ("transcribe", "translate")
        }

    def _heads(self) -> tuple[tuple[int, int], ...]:
        """Return (layer, head) of the heads for alignment: if unknown, of the last half of layers.

        OpenAI's own code has this default, too."""
        layers = self._number("decoder_layers", 0)
        heads = self._number("decoder_attention_heads", 0)
        given = self._settings.get("alignment_heads")
        if given is None or given == []:
            return tuple(product(range(layers // 2, layers), range(heads)))
        is_valid = isinstance(given, list) and all(
            isinstance(pair, list)
            and len(pair) == 2
            and _is_index(pair[0], layers)
            and _is_index(pair[1], heads)
            for pair in given
        )
        if not is_valid:
            raise self._wrong(
                "alignment_heads", given, f"pairs of one of {layers} layers and {heads} heads"
            )
        return tuple((layer, head) for layer, head in given)

    def _id(self, field: str, names: str | tuple[str, ...], default: int | None = None) -> int:
        """Return a token by its field of the settings, else by one of its names."""
        given = self._settings.get(field)
        if isinstance(given, list) and given:
            given = given[0]
        if given is not None:
            return self._checked(given, field)
        names = (names,) if isinstance(names, str) else names
        found = next((self._names[name] for name in names if name in self._names), default)
        if found is None:
            of_field = f"generation_config.json lacks {field}, and " if field else ""
            raise CheckpointError(
                f"{self._folder}: {of_field}the tokenizer has no token {names[0]}, which "
                f"transcriptions need. Fetch both files again."
            )
        return self._checked(found, names[0])

    def _ids(self, field: str) -> tuple[int, ...]:
        given = self._settings.get(field) or []
        if not isinstance(given, list):
            raise self._wrong(field, given, "a list of ids")
        return tuple(self._checked(id, field) for id in given)

    def _checked(self, id: Any, name: str) -> int:
        """Return an id that is one of the vocabulary."""
        if not _is_index(id, self._vocab_size):
            raise self._wrong(name, id, f"the id of one of {self._vocab_size} tokens")
        return int(id)

    def _number(self, field: str, default: int) -> int:
        given = self._settings.get(field)
        if given is None:
            return default
        if not _is_index(given, 2**31):
            raise self._wrong(field, given, "a number")
        return int(given)

    def _added_tokens(self) -> dict[str, int]:
        """Return the ids of the tokens that are added to the vocabulary, by their text."""
        by_id = self._read("tokenizer_config.json").get("added_tokens_decoder") or {}
        listed = self._read("tokenizer.json").get("added_tokens") or []
        found = self._read("added_tokens.json")
        try:
            found |= {str(one["content"]): int(id) for id, one in by_id.items()}
            found |= {str(one["content"]): int(one["id"]) for one in listed}
        except (AttributeError, KeyError, TypeError, ValueError):
            raise CheckpointError(
                f"{self._folder}: the tokenizer's added tokens cannot be read. Fetch it again."
            ) from None
        return found

    def _read(self, name: str) -> dict[str, Any]:
        """Return a JSON object; an empty one if there is no file."""
        try:
            found = parse_json(read_file(self._folder, name) or "{}")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self._folder / name} cannot be read: {error}.") from None
        if not isinstance(found, dict):
            raise CheckpointError(f"{self._folder / name} must be a JSON object.")
        return found

    def _wrong(self, field: str, value: object, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{self._folder}: {field} is {value!r:.60}, which is not {expected}. Fetch "
            f"generation_config.json and the tokenizer again."
        )


def _is_index(value: object, count: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < count
