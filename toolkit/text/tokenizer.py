"""Text to tokens and back."""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from toolkit.errors import CheckpointError, InvalidRequestError
from toolkit.text.chat_template import ChatTemplates, given_template
from toolkit.text.tokenizer_files import read_tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NO_SPACE_BEFORE = re.compile(r"[.?!,]|n't|'(?:m|s|ve|re)")


class Tokenizer:
    """A model's tokenizer and chat template, with the bytes of each token, so that text can be streamed without
    decoding it again. Ids are those that Transformers gives (`tokenizer_files` says where they are not).
    """

    def __init__(self, folder: Path, chat_template: str | None = None) -> None:
        """`chat_template`: a file or a template, instead of the folder's. Raises CheckpointError when the folder has no
        tokenizer that can be read, ConfigError for a template that is none.
        """
        try:
            self._files = read_tokenizer(folder)
        except Exception as error:  # the libraries raise many kinds; all mean the same here
            text = (
                str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            )
            raise CheckpointError(f"The tokenizer in {folder} cannot be used: {text}") from None
        templates = (
            self._files.templates
            if chat_template is None
            else {"default": given_template(chat_template)}
        )
        self._templates = ChatTemplates(templates, self._files.special_tokens)
        self._byte_level = "ByteLevel" in json.dumps(self._files.decoder)
        self._byte_of = _byte_of_character() if self._byte_level else {}
        self._word_pieces = (
            self._files.decoder if self._files.decoder.get("type") == "WordPiece" else None
        )
        self._all = _Spellings(self._spell)
        self._visible = _Spellings(
            lambda id: b"" if id in self._files.special_ids else self._all[id]
        )
        self._texts = {skip: _Texts(self.spellings(skip)) for skip in (True, False)}
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
        """By name: bos_token, eos_token, and so on."""
        return self._files.special_tokens

    @property
    def chat_template(self) -> str | None:
        """The usual one's source; None when there is none."""
        return self._templates.source

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises InvalidRequestError for text that is no Unicode."""
        try:
            return self._files.encode(text, add_special_tokens)
        except (TypeError, UnicodeEncodeError):  # both say that a str could not be taken as UTF-8
            raise InvalidRequestError(
                "The prompt has half a UTF-16 pair, which is no character.", param="prompt"
            ) from None

    def encode_texts(self, texts: tuple[str, ...], most: int | None) -> tuple[list[int], int]:
        """(the tokens of one text or of two together, with those that the tokenizer puts around them; where the second one's
        begin, 0 if they are not told apart). `most`: tokens that are kept, the last ones of the longer text going first.
        Raises InvalidRequestError for text that is no Unicode.
        """
        try:
            return self._files.encode_texts(texts, most)
        except (TypeError, UnicodeEncodeError):
            raise InvalidRequestError(
                "A text has half a UTF-16 pair, which is no character.", param="input"
            ) from None

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens, as it would have been streamed."""
        stream = TextStream(self, skip_special_tokens=skip_special_tokens)
        return stream.add(token_ids) + stream.end()

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        allow_special_tokens: bool = False,
        check: Callable[[str], None] = lambda text: None,
        **options: Any,
    ) -> list[int]:
        """The tokens of a conversation; `render_chat` has the options. The template writes special tokens itself: where
        one's text stands in a message, a tool or another option it is text, unless `allow_special_tokens`. `check` is
        given the whole text before it is tokenized, and may raise what it wants.
        """
        template = options.pop("chat_template", None)
        given = {"messages": messages, **options}
        mark = None
        if not allow_special_tokens and any(
            self._has_special_text(text) for text in _texts_in(given)
        ):
            # Tokens are not looked for across the mark, which stands within each special token's text.
            mark = _unused_character(given)
            given = _with_texts(given, functools.partial(self._break, mark))
        text = self.render_chat(given.pop("messages"), chat_template=template, **given)
        check(text)
        parts = [text] if mark is None else text.split(mark)
        return [token for part in parts for token in self.encode(part, add_special_tokens=False)]

    def _has_special_text(self, text: str) -> bool:
        return any(special in text for special in self._special_texts)

    def _break(self, mark: str, text: str) -> str:
        """Puts a mark into every special token's text."""
        for special in self._special_texts:
            text = text.replace(special, special[0] + mark + special[1:])
        return text

    def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """The prompt of a conversation, by the model's chat template (`ChatTemplates.render` has the options).

        Raises InvalidRequestError when there is no template, or when the template refuses the messages.
        """
        if not self.has_chat_template and options.get("chat_template") is None:
            raise InvalidRequestError(
                "This model's tokenizer has no chat template, so it cannot take chat messages. "
                "Use /v1/completions (LLM.generate), or a model made for chat.",
                code="no_chat_template",
            )
        from jinja2 import TemplateError

        try:
            return self._templates.render(messages, **options)
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise InvalidRequestError(
                f"The model's chat template refuses these messages: {error}", param="messages"
            ) from None

    @property
    def chat_template_text(self) -> str:
        """All of the model's chat templates, to be looked into; empty when there is none."""
        return self._templates.text

    def is_special_text(self, text: str) -> bool:
        """Whether a special token is spelled so."""
        return text in self._special_texts

    def is_special(self, token_id: int) -> bool:
        return token_id in self._files.special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text, in UTF-8; a part of a character can be a token."""
        return self._all[token_id]

    def spellings(self, skip_special_tokens: bool) -> Mapping[int, bytes]:
        """`token_bytes` of every token, by its id; nothing for special ones that are to be skipped."""
        return self._visible if skip_special_tokens else self._all

    def texts(self, skip_special_tokens: bool) -> Mapping[int, str | None]:
        """The same as text; None for a token that is not made of whole characters."""
        return self._texts[skip_special_tokens]

    def token_text(self, token_id: int) -> str:
        """A token alone; empty when it is only a part of a character."""
        try:
            return self.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            return ""

    def _spell(self, token_id: int) -> bytes:
        text = self._files.added.get(token_id)
        token = text if text is not None or token_id < 0 else self._files.token(token_id)
        if token is None:
            return b""  # the model's vocabulary is padded beyond the tokenizer's
        if self._word_pieces is not None:
            return _word_piece(token, self._word_pieces).encode()
        if text is not None:
            return text.encode()
        if self._byte_level:
            return bytes(self._byte_of[c] for c in token if c in self._byte_of)
        as_byte = _BYTE_TOKEN.fullmatch(token)
        if as_byte:
            return bytes([int(as_byte[1], 16)])
        return token.replace("▁", " ").encode()


class _Spellings(dict[int, bytes]):
    """A token's bytes by its id, spelled when they are first asked for."""

    def __init__(self, spell: Callable[[int], bytes]) -> None:
        self._spell = spell

    def __missing__(self, token_id: int) -> bytes:
        found = self[token_id] = self._spell(token_id)
        return found


class _Texts(dict[int, str | None]):
    """A token's text by its id, None where its bytes are not whole characters."""

    def __init__(self, spellings: Mapping[int, bytes]) -> None:
        self._spellings = spellings

    def __missing__(self, token_id: int) -> str | None:
        try:
            text = self._spellings[token_id].decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


class TextStream:
    """Text from tokens, as they come: whole characters only."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._spellings = tokenizer.spellings(skip_special_tokens)
        self._texts = tokenizer.texts(skip_special_tokens)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._within = False
        """Whether a character has begun and not ended."""

    def add(self, token_ids: list[int]) -> str:
        """The text that these tokens complete."""
        text = self._decoder.decode(b"".join(map(self._spellings.__getitem__, token_ids)))
        self._within = bool(self._decoder.getstate()[0])
        return text

    def add_one(self, token_id: int) -> str:
        """The same for one token; most are whole characters, whose text is known."""
        if not self._within:
            text = self._texts[token_id]
            if text is not None:
                return text
        return self.add([token_id])

    def end(self) -> str:
        """What an unfinished character leaves: U+FFFD, or nothing."""
        return self._decoder.decode(b"", final=True)


class SpacedTextStream(TextStream):
    """The same with special tokens, and a space between each of them and what stands beside it: what Transformers'
    `decode` calls `spaces_between_special_tokens`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, skip_special_tokens=False)
        self._is_special = tokenizer.is_special
        self._after_special: bool | None = None
        """Whether the last token was a special one; None when there was none."""

    def add(self, token_ids: list[int]) -> str:
        """The text that these tokens complete."""
        return "".join(map(self.add_one, token_ids))

    def add_one(self, token_id: int) -> str:
        """The same for one token."""
        special, after = self._is_special(token_id), self._after_special
        self._after_special = special
        gap = " " if after is not None and (special or after) else ""
        return gap + super().add([token_id])


_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json", "tekken.json")


def load_tokenizer(folder: Path, chat_template: str | None = None) -> Tokenizer | None:
    """The folder's tokenizer; None when it has no file of one (then only prompts of token ids can be run).
    `chat_template`: a file or a template, instead of the folder's.
    """
    if not any((folder / name).is_file() for name in _FILES):
        return None
    return Tokenizer(folder, chat_template)


def eos_token_ids(folder: Path, tokenizer: Tokenizer | None) -> list[int]:
    """Every token that ends an answer: those of generation_config.json, config.json and the tokenizer."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            value = json.loads(path.read_text()).get("eos_token_id")
            found += value if isinstance(value, list) else [value] if isinstance(value, int) else []
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.append(tokenizer.eos_token_id)
    return sorted(set(found))


def _texts_in(value: Any) -> Iterator[str]:
    """All texts in what JSON can hold, names of fields included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield from _texts_in(name)
            yield from _texts_in(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts_in(one)


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """The same with every text changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_with_texts(name, change): _with_texts(one, change) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_with_texts(one, change) for one in value]
    return value


def _unused_character(value: Any) -> str:
    """One for private use that stands in none of the texts."""
    used = set().union(*_texts_in(value))
    return next(c for c in map(chr, range(0xF0000, 0x110000)) if c not in used)


def _word_piece(token: str, decoder: dict[str, Any]) -> str:
    """A word begins with a space, and a piece within one with a prefix; `cleanup` takes the space before punctuation
    and English endings away.
    """
    if token.startswith(decoder["prefix"]):
        return token.removeprefix(decoder["prefix"])
    if decoder["cleanup"] and _NO_SPACE_BEFORE.match(token):
        return token
    return f" {token}"


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes each byte as a printable character: itself where it is one, else the next from
    U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table
