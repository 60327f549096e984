"""Convert text to tokens and back."""

import codecs
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from toolkit.errors import CheckpointError, InvalidRequestError
from toolkit.files import parse_json
from toolkit.gguf.file import read_gguf
from toolkit.gguf.folder import is_gguf, read_file
from toolkit.gguf.tokenizer import has_tokenizer
from toolkit.text.chat_template import ChatTemplates, describe, load_template
from toolkit.text.harmony import ANSWER_ENDS, is_harmony
from toolkit.text.tokenizer_files import read_tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NO_SPACE_BEFORE = re.compile(r"[.?!,]|n't|'(?:m|s|ve|re)")


class Tokenizer:
    """Tokenizer and chat templates of a model. It knows the bytes of each token, to stream text.

    Token ids are those of Transformers; `tokenizer_files` lists the exceptions."""

    def __init__(self, folder: Path, chat_template: str | None = None) -> None:
        """`chat_template`: a file or a template to use instead of the folder's.

        Raises CheckpointError if the folder has no usable tokenizer, ConfigError for a bad
        template."""
        try:
            self._files = read_tokenizer(folder)
        except CheckpointError:
            raise
        except Exception as error:  # the libraries raise many types for a broken file
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise CheckpointError(f"The tokenizer in {folder} cannot be used: {lines[0]}") from None
        templates = self._files.templates
        if chat_template is not None:
            templates = {"default": load_template(chat_template)}
        self._templates = ChatTemplates(templates, self._files.special_tokens)
        decoder = self._files.decoder
        self._is_byte_level = "ByteLevel" in json.dumps(decoder)
        self._byte_of = _byte_of_character() if self._is_byte_level else {}
        self._word_piece = decoder if decoder.get("type") == "WordPiece" else None
        self._all_bytes = _ByteTable(self._compute_bytes)
        self._visible_bytes = _ByteTable(
            lambda id: b"" if id in self._files.special_ids else self._all_bytes[id]
        )
        self._texts = {skip: _TextTable(self.byte_table(skip)) for skip in (True, False)}
        self._byte_lists = _ByteListTable(self._all_bytes)
        self._names = _NameTable(self._texts[False], self._all_bytes)
        added = self._files.added.items()
        self._special_texts = sorted(
            text for id, text in added if text and id in self._files.special_ids
        )

    @property
    def eos_token_id(self) -> int | None:
        return self._files.eos_token_id

    @property
    def size(self) -> int:
        return self._files.size

    @property
    def special_tokens(self) -> dict[str, str]:
        """Special tokens by name: bos_token, eos_token, and so on."""
        return self._files.special_tokens

    @property
    def chat_template(self) -> str | None:
        """Source of the default chat template, if there is one."""
        return self._templates.source

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises InvalidRequestError for text that is not valid Unicode."""
        try:
            return self._files.encode(text, add_special_tokens)
        except (TypeError, UnicodeEncodeError):  # the str cannot be encoded as UTF-8
            raise InvalidRequestError(
                "The prompt has half a UTF-16 surrogate pair, which is not a character.",
                param="prompt",
            ) from None

    def encode_texts(self, texts: tuple[str, ...], limit: int | None) -> tuple[list[int], int]:
        """Tokenize one text, or two as a pair, with the tokenizer's special tokens.

        `limit`: tokens to keep; the end of the longer text is cut first. Returns (ids, start of
        the second text, 0 if its tokens have no type id of their own). Raises InvalidRequestError
        for text that is not valid Unicode."""
        try:
            return self._files.encode_texts(texts, limit)
        except (TypeError, UnicodeEncodeError):
            raise InvalidRequestError(
                "A text has half a UTF-16 surrogate pair, which is not a character.", param="input"
            ) from None

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens. Streaming them gives the same text."""
        stream = TextStream(self, skip_special_tokens=skip_special_tokens)
        return stream.add(token_ids) + stream.end()

    def offsets(self, token_ids: list[int], text: str) -> list[int]:
        """Return where each token of a prompt begins in its text.

        A part of a character is where the character is. The text may lack special tokens, the space
        that a vocabulary puts before it, and what was cut from the prompt's start."""
        stream = TextStream(self, skip_special_tokens=False)
        whole = self.decode(token_ids, skip_special_tokens=False)
        at = len(text) - len(whole) if text.endswith(whole) else 0
        found = []
        for token in token_ids:
            before, added = stream.place(token)
            found.append(at + before)
            if not text.startswith(added, at):
                if self.is_special(token):
                    continue
                if text.startswith(added[1:], at):
                    added = added[1:]
            at = min(at + len(added), len(text))
        return found

    def protect(self, options: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
        """Return options of a chat template with their special tokens as ordinary text.

        Each special token's text is split by a separator, which is returned for `encode_chat`;
        None if there is none to split. Only the template itself can then write special tokens."""
        if not any(self._has_special_text(text) for text in _texts_in(options)):
            return options, None
        separator = unused_character(options)
        return _map_texts(
            options, functools.partial(self._split_special_texts, separator)
        ), separator

    def encode_chat(self, text: str, separator: str | None) -> list[int]:
        """Tokenize the prompt that a chat template has made of protected options."""
        parts = [text] if separator is None else text.split(separator)
        return [token for part in parts for token in self.encode(part, add_special_tokens=False)]

    def _has_special_text(self, text: str) -> bool:
        return any(special in text for special in self._special_texts)

    def _split_special_texts(self, separator: str, text: str) -> str:
        for special in self._special_texts:
            text = text.replace(special, special[0] + separator + special[1:])
        return text

    def find_template(self, name_or_source: str) -> str:
        """Return the source of one of the model's chat templates, or of another template."""
        return self._templates.find(name_or_source)

    def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """Return the prompt of a conversation. `options` are those of `ChatTemplates.render`.

        Raises InvalidRequestError if there is no template, or if it refuses the messages."""
        if not self.has_chat_template and options.get("chat_template") is None:
            raise InvalidRequestError(
                "This model's tokenizer has no chat template, so it cannot take chat messages. "
                "Use /v1/completions (LLM.generate), a model made for chat, or --chat-template.",
                code="no_chat_template",
            )
        try:
            return self._templates.render(messages, **options)
        except Exception as error:  # expressions raise any type for messages they do not expect
            raise InvalidRequestError(
                f"The model's chat template refuses these messages: {describe(error)}",
                param="messages",
            ) from None

    @property
    def chat_template_text(self) -> str:
        """Source of all chat templates, joined; empty if there is none."""
        return self._templates.text

    def is_special_text(self, text: str) -> bool:
        """True if `text` is the text of a special token."""
        return text in self._special_texts

    def is_special(self, token_id: int) -> bool:
        return token_id in self._files.special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's part of the text, in UTF-8. A token can be a part of a character."""
        return self._all_bytes[token_id]

    @property
    def byte_lists(self) -> Mapping[int, list[int]]:
        """`token_bytes` by token id, as lists that are shared: read only."""
        return self._byte_lists

    def byte_table(self, skip_special_tokens: bool) -> Mapping[int, bytes]:
        """Return `token_bytes` by token id. Special tokens to skip are empty."""
        return self._visible_bytes if skip_special_tokens else self._all_bytes

    def text_table(self, skip_special_tokens: bool) -> Mapping[int, str | None]:
        """Return token texts by token id. A token with a part of a character is None."""
        return self._texts[skip_special_tokens]

    @property
    def token_names(self) -> Mapping[int, str]:
        """Text of each token by id. A part of a character is written as `bytes:\\xe6\\x9d`."""
        return self._names

    def _compute_bytes(self, token_id: int) -> bytes:
        text = self._files.added.get(token_id)
        token = text if text is not None or token_id < 0 else self._files.token(token_id)
        if token is None:
            return b""  # the model's vocabulary is padded beyond the tokenizer's
        if self._word_piece is not None:
            return _decode_word_piece(token, self._word_piece).encode()
        if text is not None:
            return text.encode()
        if self._is_byte_level:
            return bytes(self._byte_of[c] for c in token if c in self._byte_of)
        as_byte = _BYTE_TOKEN.fullmatch(token)
        if as_byte:
            return bytes([int(as_byte[1], 16)])
        return token.replace("▁", " ").encode()


class _ByteTable(dict[int, bytes]):
    """Bytes of each token by id, computed on first use."""

    def __init__(self, compute: Callable[[int], bytes]) -> None:
        self._compute = compute

    def __missing__(self, token_id: int) -> bytes:
        found = self[token_id] = self._compute(token_id)
        return found


class _ByteListTable(dict[int, list[int]]):
    """Bytes of each token by id, as JSON has them."""

    def __init__(self, byte_table: Mapping[int, bytes]) -> None:
        self._byte_table = byte_table

    def __missing__(self, token_id: int) -> list[int]:
        found = self[token_id] = list(self._byte_table[token_id])
        return found


class _TextTable(dict[int, str | None]):
    """Text of each token by id; None if its bytes are not complete characters."""

    def __init__(self, byte_table: Mapping[int, bytes]) -> None:
        self._byte_table = byte_table

    def __missing__(self, token_id: int) -> str | None:
        try:
            text = self._byte_table[token_id].decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


class _NameTable(dict[int, str]):
    """Text of each token by id, or its bytes if they are not complete characters."""

    def __init__(self, texts: Mapping[int, str | None], byte_table: Mapping[int, bytes]) -> None:
        self._texts, self._byte_table = texts, byte_table

    def __missing__(self, token_id: int) -> str:
        name = self._texts[token_id]
        if name is None:
            name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in self._byte_table[token_id])
        self[token_id] = name
        return name


class TextStream:
    """Incremental decoder: returns complete characters only."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._bytes = tokenizer.byte_table(skip_special_tokens)
        self._texts = tokenizer.text_table(skip_special_tokens)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._has_partial_character = False

    def add(self, token_ids: list[int]) -> str:
        """Return the characters that these tokens complete."""
        text = self._decoder.decode(b"".join(map(self._bytes.__getitem__, token_ids)))
        self._has_partial_character = bool(self._decoder.getstate()[0])
        return text

    def add_one(self, token_id: int) -> str:
        """Return the characters that one token completes. Most tokens have a known text."""
        if not self._has_partial_character:
            text = self._texts[token_id]
            if text is not None:
                return text
        return self.add([token_id])

    def place(self, token_id: int) -> tuple[int, str]:
        """Return where a token begins in the characters that it completes, and these.

        It begins after U+FFFD if what was incomplete before it remains so."""
        had_partial, text = self._has_partial_character, self._texts[token_id]
        added = self.add_one(token_id)
        if text is not None:
            return len(added) - len(text), added
        begins_character = not 0x80 <= self._bytes[token_id][0] < 0xC0
        return int(had_partial and begins_character), added

    def end(self) -> str:
        """Return U+FFFD for an incomplete character at the end; otherwise nothing."""
        return self._decoder.decode(b"", final=True)


class SpacedTextStream(TextStream):
    """Keeps special tokens, with a space between each and its neighbours.

    Transformers' `decode` calls this `spaces_between_special_tokens`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, skip_special_tokens=False)
        self._is_special = tokenizer.is_special
        self._was_special: bool | None = None  # the last token; None: there was none

    def add(self, token_ids: list[int]) -> str:
        return "".join(map(self.add_one, token_ids))

    def add_one(self, token_id: int) -> str:
        is_special, was_special = self._is_special(token_id), self._was_special
        self._was_special = is_special
        space = " " if was_special is not None and (is_special or was_special) else ""
        return space + super().add([token_id])


_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json", "tekken.json")


def text_stream(
    tokenizer: Tokenizer, *, skip_special_tokens: bool, spaces_between_special_tokens: bool
) -> TextStream:
    """Return the decoder of an answer."""
    if spaces_between_special_tokens and not skip_special_tokens:
        return SpacedTextStream(tokenizer)
    return TextStream(tokenizer, skip_special_tokens=skip_special_tokens)


def load_tokenizer(folder: Path, chat_template: str | None = None) -> Tokenizer | None:
    """Return the folder's tokenizer; None if it has no tokenizer files.

    `chat_template`: a file or a template to use instead of the folder's."""
    has_one = (
        has_tokenizer(read_gguf(folder))
        if is_gguf(folder)
        else any((folder / name).is_file() for name in _FILES)
    )
    if not has_one:
        return None
    return Tokenizer(folder, chat_template)


def unused_character(value: Any) -> str:
    """Return a private-use character that no text contains."""
    used = set().union(*_texts_in(value))
    return next(c for c in map(chr, range(0xF0000, 0x110000)) if c not in used)


def eos_token_ids(folder: Path, tokenizer: Tokenizer | None) -> list[int]:
    """Return the tokens that end an answer, by generation_config.json, config.json, tokenizer.

    A chat template in harmony adds harmony's: GGUF files name one of them."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = _eos_in(folder, name)
        found += value if isinstance(value, list) else [] if value is None else [value]
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.append(tokenizer.eos_token_id)
    if tokenizer is not None and is_harmony(tokenizer.chat_template_text):
        ends = [tokenizer.encode(end, add_special_tokens=False) for end in ANSWER_ENDS]
        found += [ids[0] for ids in ends if len(ids) == 1]
    return sorted(set(found))


def _eos_in(folder: Path, name: str) -> int | list[int] | None:
    """Return a file's `eos_token_id`. Raises CheckpointError if it is anything else."""
    try:
        raw = parse_json(read_file(folder, name) or "{}")
        given = raw.get("eos_token_id", (raw.get("text_config") or {}).get("eos_token_id"))
        return msgspec.convert(given, int | list[int] | None)
    except (OSError, ValueError, AttributeError) as error:
        problem = f"eos_token_id: {error}" if isinstance(error, msgspec.DecodeError) else error
        raise CheckpointError(f"{folder / name} cannot be used: {problem}.") from None


def _texts_in(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value, including names of fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield from _texts_in(name)
            yield from _texts_in(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts_in(one)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with `change` applied to all texts."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_texts(name, change): _map_texts(one, change) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_map_texts(one, change) for one in value]
    return value


def _decode_word_piece(token: str, decoder: dict[str, Any]) -> str:
    """Put a space before a token that begins a word. Other tokens have a prefix, which is removed.

    With `cleanup` there is no space before punctuation and English endings either."""
    if token.startswith(decoder["prefix"]):
        return token.removeprefix(decoder["prefix"])
    if decoder["cleanup"] and _NO_SPACE_BEFORE.match(token):
        return token
    return f" {token}"


def _byte_of_character() -> dict[str, int]:
    """Return the byte of each character in byte-level BPE (GPT-2).

    A printable byte is its own character; the others are U+0100 and the following ones."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table
