"""Read a tokenizer's files: `tokenizer.json`, and the special tokens in the files next to it.

The `tokenizers` library reads `tokenizer.json`. Transformers adds seconds and hundreds of megabytes
to every process that imports it, so it is used only if there is no `tokenizer.json`.

Transformers' classes replace parts of some pipelines in the file. Here the file decides. The token
ids are the same for the tokenizers published with GPT-2, Llama 3, Mistral, Qwen2 and Qwen3. For
Llama 2 they would differ, so the prefix of words follows Transformers' `LlamaTokenizer`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from toolkit.errors import InvalidRequestError
from toolkit.files import read_json
from toolkit.gguf.file import read_gguf
from toolkit.gguf.folder import is_gguf
from toolkit.gguf.tokenizer import build_tokenizer, tokenizer_config
from toolkit.text.chat_template import read_templates, templates_by_name
from toolkit.text.growth import check_growth

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

_Ids = TypeVar("_Ids")
_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)

_END = "<|endoftext|>"
_DEFAULTS: dict[str, dict[str, Any]] = {
    "GPT2Tokenizer": {"bos_token": _END, "eos_token": _END, "unk_token": _END},
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "Qwen2Tokenizer": {"eos_token": _END, "unk_token": _END, "pad_token": _END},
}  # special tokens of Transformers' classes, for files that name none, such as GPT-2's

_DEFAULT_CLASSES = {
    "gpt2": "GPT2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "qwen3_moe": "Qwen2Tokenizer",
}  # class by model type, for files that name none
_FIXED_CLASSES = {"mistral": "TokenizersBackend", "qwen2": "Qwen2Tokenizer"}
"""Class by model type, regardless of the files: published ones name the wrong class."""


@dataclass(frozen=True)
class TokenizerFiles:
    """Contents of a tokenizer's files."""

    encode: Callable[[str, bool], list[int]]
    """Maps (text, add special tokens) to ids. Raises TypeError or UnicodeEncodeError for text that
    is not valid Unicode."""
    encode_texts: Callable[[tuple[str, ...], int | None], tuple[list[int], int]]
    """Maps (one text or two, tokens to keep) to (ids, start of the second text). See
    `Tokenizer.encode_texts`. Raises the errors of `encode`."""
    token: Callable[[int], str | None]
    """Returns a token as the vocabulary writes it; None for an unknown id."""
    size: int  # tokens, including those added to the vocabulary
    special_tokens: dict[str, str]  # by name: bos_token, eos_token, and so on
    eos_token_id: int | None
    special_ids: frozenset[int]
    added: dict[int, str]
    """Texts of the tokens added to the vocabulary. They are matched before any other token."""
    decoder: dict[str, Any]  # as in tokenizer.json; empty if there is none
    templates: dict[str, str]  # chat templates by name, such as "default"


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """Raises OSError, ValueError and the libraries' own exceptions for a broken file."""
    if is_gguf(folder):
        model = read_gguf(folder)
        return _describe_backend(build_tokenizer(model), folder, tokenizer_config(model))
    path = folder / "tokenizer.json"
    return _read_json(folder, path) if path.is_file() else _read_with_transformers(folder)


def _read_json(folder: Path, path: Path) -> TokenizerFiles:
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(path))
    check_growth(_description(backend.normalizer))
    backend.no_truncation()
    backend.no_padding()
    config = _json(folder / "tokenizer_config.json")
    name = _class_name(config, _json(folder / "config.json"), backend)
    if name == "LlamaTokenizer":
        _rebuild_as_llama(backend, config)
    backend.encode_special_tokens = bool(config.get("split_special_tokens"))
    return _describe_backend(backend, folder, _DEFAULTS.get(name, {}) | config)


def _describe_backend(backend: Backend, folder: Path, config: dict[str, Any]) -> TokenizerFiles:
    """Describe a tokenizer after adding its special tokens. `config`: its tokenizer_config.json."""
    declared, named, extra = _special_tokens(folder, config)
    _add_missing(backend, declared, named, extra)
    added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
    named_ids = {_id(backend, token) for token in [*named.values(), *extra]} - {None}
    eos = named.get("eos_token")
    return TokenizerFiles(
        # A batch of one releases the GIL; `encode` does not.
        encode=_without_panic(
            lambda text, special: (
                backend.encode_batch_fast([text], add_special_tokens=special)[0].ids
            )
        ),
        encode_texts=_without_panic(lambda texts, limit: _encode_texts(backend, texts, limit)),
        token=backend.id_to_token,
        size=backend.get_vocab_size(with_added_tokens=True),
        special_tokens={name: _content(token) for name, token in named.items()},
        eos_token_id=None if eos is None else _id(backend, eos),
        special_ids=frozenset(named_ids | {id for id, token in added.items() if token.special}),
        added={id: token.content for id, token in added.items()},
        decoder=_description(backend.decoder),
        templates=read_templates(folder, config),
    )


def _read_with_transformers(folder: Path) -> TokenizerFiles:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    backend = getattr(tokenizer, "backend_tokenizer", None)
    size = len(tokenizer)
    return TokenizerFiles(
        encode=lambda text, special: tokenizer.encode(
            text, add_special_tokens=special, verbose=False
        ),
        encode_texts=lambda texts, limit: _encode_with_transformers(tokenizer, texts, limit),
        token=lambda id: tokenizer.convert_ids_to_tokens(id) if id < size else None,
        size=size,
        special_tokens=tokenizer.special_tokens_map,
        eos_token_id=tokenizer.eos_token_id,
        # Tokens such as Llama 3's <|start_header_id|> are special without having a name.
        special_ids=frozenset(tokenizer.all_special_ids)
        | {id for id, t in added.items() if t.special},
        added={id: token.content for id, token in added.items()},
        decoder=_description(getattr(backend, "decoder", None)),
        templates=templates_by_name(getattr(tokenizer, "chat_template", None)),
    )


def _without_panic(encode: Callable[[Any, Any], _Ids]) -> Callable[[Any, Any], _Ids]:
    """Let `encode` raise InvalidRequestError for a text on which a regular expression gives up.

    The library panics, with a class that no `except Exception` catches and nothing exports."""

    def checked(text: Any, option: Any) -> _Ids:
        try:
            return encode(text, option)
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            raise InvalidRequestError(f"The tokenizer cannot read this text: {error}") from None

    return checked


def _encode_texts(
    backend: Backend, texts: tuple[str, ...], limit: int | None
) -> tuple[list[int], int]:
    encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)
    if limit is not None:
        room = max(0, limit - backend.num_special_tokens_to_add(len(texts) == 2))
        lengths = _truncated_lengths([len(encoding.ids) for encoding in encodings], room)
        for encoding, length in zip(encodings, lengths, strict=True):
            encoding.truncate(length)
    joined = backend.post_process(encodings[0], encodings[1] if len(texts) == 2 else None, True)
    return joined.ids, _second_text_start(joined.type_ids)


def _truncated_lengths(lengths: list[int], room: int) -> list[int]:
    """Fit one or two texts into `room`: cut the longer down to the shorter, then both equally."""
    if len(lengths) == 1:
        return [min(lengths[0], room)]
    shorter, longer = sorted(lengths)
    if shorter + longer <= room:
        return lengths
    longer = max(shorter, room - shorter)
    if shorter + longer > room:
        shorter, longer = room // 2, room - room // 2
    return [shorter, longer] if lengths[0] <= lengths[1] else [longer, shorter]


def _encode_with_transformers(
    tokenizer: Any, texts: tuple[str, ...], limit: int | None
) -> tuple[list[int], int]:
    truncation = {} if limit is None else {"truncation": True, "max_length": limit}
    encoding = tokenizer(*texts, **truncation, verbose=False)
    return list(encoding["input_ids"]), _second_text_start(encoding.get("token_type_ids") or [])


def _second_text_start(type_ids: list[int]) -> int:
    return type_ids.index(1) if 1 in type_ids else 0


def _class_name(config: dict[str, Any], model: dict[str, Any], backend: Backend) -> str:
    """Return the Transformers class that AutoTokenizer would choose for these files."""
    model_type = model.get("model_type", "")
    if model_type in _FIXED_CLASSES:
        return _FIXED_CLASSES[model_type]
    named = (
        config.get("tokenizer_class")
        or model.get("tokenizer_class")
        or _DEFAULT_CLASSES.get(model_type, "")
    )
    name = str(named).removesuffix("Fast")
    if name == "LlamaTokenizer":
        parts = (backend.pre_tokenizer, backend.decoder, backend.post_processor)
        if any("ByteLevel" in json.dumps(_description(part)) for part in parts):
            return "TokenizersBackend"  # Llama 3's tokenizer under Llama 2's name
    return name


def _rebuild_as_llama(backend: Backend, config: dict[str, Any]) -> None:
    """Put `▁` where Transformers' LlamaTokenizer does.

    It comes before the first word only or, with `legacy`, also after each special token. Llama 2's
    files put it after each special token, and before a leading space."""
    from tokenizers import decoders, pre_tokenizers

    prefix = config.get("add_prefix_space")
    prefix = True if prefix is None else prefix
    scheme = "never" if not prefix else "always" if config.get("legacy") else "first"
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    strip = [decoders.Strip(content=" ", left=1)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )


def _special_tokens(
    folder: Path, config: dict[str, Any]
) -> tuple[list[AddedToken], dict[str, AddedToken | str], list[AddedToken | str]]:
    """Return (declared added tokens, special tokens by name, special tokens without a name)."""
    from tokenizers import AddedToken

    config = dict(config)
    extra = config.pop("additional_special_tokens", None)
    extra = config.pop("extra_special_tokens", None) or extra or []
    listed = config.get("added_tokens_decoder")
    declared = [
        AddedToken(**token) for _, token in sorted((listed or {}).items(), key=lambda t: int(t[0]))
    ]
    if listed is None:  # files from before 2023
        legacy = _json(folder / "special_tokens_map.json")
        more = legacy.pop("extra_special_tokens", None) or legacy.pop(
            "additional_special_tokens", None
        )
        extra = extra or more or []
        config |= {
            name: _as_special(value) for name, value in legacy.items() if name.endswith("_token")
        }
    # The order decides the ids of tokens that the vocabulary lacks.
    order = dict.fromkeys(_TOKEN_NAMES) | config
    named = {name: _as_token(value) for name, value in order.items() if _names_token(name, value)}
    if isinstance(extra, dict):
        named |= {name: _as_token(value) for name, value in extra.items()}
        extra = []
    if listed is None:
        special = {_content(token) for token in [*named.values(), *map(_as_token, extra)]}
        ids = _json(folder / "added_tokens.json")
        declared += [
            AddedToken(text, normalized=text not in special, special=text in special)
            for text in sorted(ids, key=ids.__getitem__)
        ]
    return declared, named, [_as_token(token) for token in extra]


def _names_token(key: str, value: object) -> bool:
    """True for the usual names, and for a model's own, such as image_token."""
    if key in _TOKEN_NAMES:
        return value is not None
    return key.endswith("_token") and (
        isinstance(value, str) or (isinstance(value, dict) and "content" in value)
    )


def _add_missing(
    backend: Backend,
    declared: list[AddedToken],
    named: dict[str, AddedToken | str],
    extra: Iterable[AddedToken | str],
) -> None:
    """Add special tokens that the file lacks or has as ordinary tokens.

    A declaration that differs from the file's replaces it."""
    from tokenizers import AddedToken

    present: Iterable[AddedToken] = backend.get_added_tokens_decoder().values()
    same = {repr(token) for token in present}
    missing: list[AddedToken | str] = [token for token in declared if repr(token) not in same]
    known = {token.content for token in present} | {_content(token) for token in missing}
    missing += [token for token in [*named.values(), *extra] if _content(token) not in known]
    names = {_content(token) for token in named.values()}
    tokens = [
        AddedToken(token, special=True) if isinstance(token, str) else token for token in missing
    ]
    for token in tokens:
        token.special = token.special or token.content in names
    backend.add_tokens(tokens)


def _as_special(value: Any) -> Any:
    return {**value, "special": True} if isinstance(value, dict) else value


def _as_token(value: Any) -> AddedToken | str:
    """Parse a special token: its text, or an object with its text and flags."""
    if isinstance(value, dict) and "content" in value:
        from tokenizers import AddedToken

        return AddedToken(**{key: flag for key, flag in value.items() if key != "__type"})
    if not isinstance(value, str):
        raise TypeError(f"a special token must be a text, not {value!r}")
    return value


def _content(token: AddedToken | str) -> str:
    return token if isinstance(token, str) else str(token.content)


def _id(backend: Backend, token: AddedToken | str) -> Any:
    """Return a token's id; None for the empty text, which is not a token."""
    return backend.token_to_id(_content(token))


def _json(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if there is no such file."""
    content: dict[str, Any] = read_json(path) if path.is_file() else {}
    return content


def _description(part: Any) -> dict[str, Any]:
    """Return a part of a tokenizer in the format of tokenizer.json."""
    content: dict[str, Any] = {} if part is None else json.loads(bytes(part.__getstate__()))
    return content
