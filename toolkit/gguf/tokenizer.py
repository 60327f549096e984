"""Build the tokenizer that a GGUF file describes, and what belongs to it, from the metadata.

Two kinds exist: byte-level BPE (`gpt2`), whose way of splitting text has a name
(`tokenizer.ggml.pre`), and SentencePiece's BPE (`llama`), which merges by the result's score."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolkit.errors import CheckpointError
from toolkit.gguf.file import GGUF

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6  # values of token_type
_ENDINGS = r"'s|'t|'re|'ve|'m|'ll|'d"
_ANY_CASE_ENDINGS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2 = rf"{_ENDINGS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str, letters: str = r"\p{L}") -> str:
    """Return GPT-4's expression: words with one character before them, runs of `digits`, others."""
    return (
        rf"{_ANY_CASE_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}"
        rf"| ?[^\s{letters}\p{{N}}]+[\r\n]*|{_SPACES}"
    )


def _cased_words(digits: str, endings: str) -> str:
    """Return GPT-4o's expression, in which a word ends before a capital letter."""
    before, upper, lower = (
        r"[^\r\n\p{L}\p{N}]?",
        r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]",
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]",
    )
    return (
        rf"{before}{upper}*{lower}+{endings}|{before}{upper}+{lower}*{endings}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_SPLITS = {
    "gpt-2": (_GPT2,),
    "llama-bpe": (_words(r"\p{N}{1,3}"),),
    "qwen2": (_words(r"\p{N}"),),
    "qwen35": (_words(r"\p{N}", r"\p{L}\p{M}"),),
    "starcoder": (r"\p{N}", _GPT2),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "tekken": (_cased_words(r"\p{N}", ""),),
    "gpt-4o": (_cased_words(r"\p{N}{1,3}", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"),),
    "seed-coder": (
        rf"{_ANY_CASE_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",
    ),
}
"""Expressions by name. Text is split by the first, its parts by the second, and so on."""
_SAME_SPLITS = {
    "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 dbrx smaug-bpe chatglm-bpe "
    "glm4 lfm2",
    "gpt-2": "gpt2 phi-2 mpt olmo jais trillion granite-docling modern-bert jina-es jina-de "
    "roberta-bpe",
    "qwen2": "stablelm2 hunyuan hunyuan-dense megrez deepseek-r1-qwen",
    "starcoder": "refact command-r smollm codeshell exaone minerva-7b",
    "gpt-4o": "llama4 exaone-moe",
}
"""Other names of the same expressions."""
_MERGES_LAST = {"llama-bpe", "tekken"}
"""A word that is in the vocabulary is one token, even if merges lead elsewhere."""
_ADDS_BOS = ["llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"]
_NFC = ("qwen2", "qwen35")
_END_TEXTS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<EOT>",
    "<|end_of_turn|>",
    "[|endofturn|]",
    "<|END_OF_TURN_TOKEN|>",
)
"""Control tokens that end an answer, also in files that do not say so."""
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_LLAMA_CPP = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""Defaults of llama.cpp for files that name none. Small models are incoherent without."""
_NAMES = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
    "seperator": "sep_token",  # so in the format
    "mask": "mask_token",
}


def has_tokenizer(model: GGUF) -> bool:
    return model.get("tokenizer.ggml.model", str, "none") not in ("none", "no_vocab")


def build_tokenizer(model: GGUF) -> Backend:
    """Raises CheckpointError if the metadata is incomplete, or of a kind that tk does not know."""
    from tokenizers import AddedToken, Tokenizer

    file = model.files[0]
    kind = model.get("tokenizer.ggml.model", str)
    tokens, types = _tokens(model)
    if kind == "gpt2":
        backend = Tokenizer(_byte_level_bpe(model, tokens))
        _split_like(backend, model)
    elif kind == "llama":
        backend = Tokenizer(_sentencepiece_bpe(model, tokens, types))
        _replace_spaces(backend, has_prefix=_flag(model, "add_space_prefix", True))
    else:
        raise CheckpointError(
            f"{file} has a tokenizer of the unsupported type {kind!r}. Supported: gpt2, llama. Use "
            f"--tokenizer with the folder or hub name of the original model."
        )
    backend.add_tokens(
        [
            AddedToken(token, special=type_ == _CONTROL, normalized=False)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ in (_CONTROL, _USER_DEFINED) and token
        ]
    )
    _add_ends(backend, model, tokens)
    return backend


def tokenizer_config(model: GGUF) -> dict[str, Any]:
    """Return the special tokens by name, and the chat templates, as in tokenizer_config.json."""
    found: dict[str, Any] = {}
    if has_tokenizer(model):
        kind, split = (model.get(f"tokenizer.ggml.{key}", str) for key in ("model", "pre"))
        found["tokenizer_class"] = f"{kind} ({split})" if split and kind == "gpt2" else kind
        tokens, _ = _tokens(model)
        for key, name in _NAMES.items():
            token = _token_id(model, key, tokens)
            if token is not None:
                found[name] = tokens[token]
    template = model.get("tokenizer.chat_template", str)
    names = model.get("tokenizer.chat_templates", list, [])
    if names:
        found["chat_template"] = [
            {"name": name, "template": model.get(f"tokenizer.chat_template.{name}", str, "")}
            for name in names
        ]
        if template:
            found["chat_template"].append({"name": "default", "template": template})
    elif template:
        found["chat_template"] = template
    return found


def generation_config(model: GGUF) -> dict[str, Any]:
    """Return the tokens that end an answer, and defaults of sampling."""
    found: dict[str, Any] = {}
    for key, name in _SAMPLING.items():
        value = model.get(f"general.sampling.{key}", (int, float))
        if value is not None:
            found[name] = value
    found = found or dict(_LLAMA_CPP)
    if has_tokenizer(model):
        tokens, types = _tokens(model)
        ends = {_token_id(model, key, tokens) for key in ("eos", "eot", "eom")} - {None}
        ends |= {
            i
            for i, (token, type_) in enumerate(zip(tokens, types, strict=True))
            if type_ == _CONTROL and token in _END_TEXTS
        }
        found["eos_token_id"] = sorted(ends)
    return found


def _tokens(model: GGUF) -> tuple[list[str], list[int]]:
    """Return the tokens and their types."""
    tokens = model.get("tokenizer.ggml.tokens", list, [])
    types = model.get("tokenizer.ggml.token_type", list, [1] * len(tokens))
    if not tokens or len(types) != len(tokens) or not isinstance(tokens[0], str):
        raise CheckpointError(
            f"{model.files[0]} has {len(tokens)} tokens and {len(types)} types of tokens. Use "
            f"--tokenizer with the folder or hub name of the original model."
        )
    return tokens, types


def _token_id(model: GGUF, key: str, tokens: list[str]) -> int | None:
    token: int | None = model.get(f"tokenizer.ggml.{key}_token_id", int)
    return token if token is not None and 0 <= token < len(tokens) else None


def _flag(model: GGUF, key: str, default: bool) -> bool:
    return bool(model.get(f"tokenizer.ggml.{key}", (bool, int), default))


def _split_name(model: GGUF) -> str:
    """Return the key in `_SPLITS`."""
    name: str = model.get("tokenizer.ggml.pre", str, "default")
    if name in _SPLITS:
        return name
    for known, others in _SAME_SPLITS.items():
        if name in others.split():
            return known
    raise CheckpointError(
        f"{model.files[0]} has the unknown tokenizer.ggml.pre {name!r}. Use --tokenizer with the "
        f"folder or hub name of the original model."
    )


def _byte_level_bpe(model: GGUF, tokens: list[str]) -> models.BPE:
    from tokenizers import models

    merges = [tuple(merge.split(" ", 1)) for merge in model.get("tokenizer.ggml.merges", list, [])]
    known = dict(zip(tokens, range(len(tokens)), strict=True))
    usable = [
        merge for merge in merges if len(merge) == 2 and all(part in known for part in merge)
        and "".join(merge) in known
    ]  # fmt: skip
    return models.BPE(vocab=known, merges=usable, ignore_merges=_split_name(model) in _MERGES_LAST)


def _split_like(backend: Backend, model: GGUF) -> None:
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    splits = [
        pre_tokenizers.Split(Regex(expression), "isolated")
        for expression in _SPLITS[_split_name(model)]
    ]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    if model.get("tokenizer.ggml.pre", str) in _NFC:
        backend.normalizer = normalizers.NFC()


def _sentencepiece_bpe(model: GGUF, tokens: list[str], types: list[int]) -> models.BPE:
    from tokenizers import models

    scores = model.get("tokenizer.ggml.scores", list, [])
    if len(scores) != len(tokens):
        raise CheckpointError(
            f"{model.files[0]} has {len(tokens)} tokens and {len(scores)} scores. Use --tokenizer "
            f"with the folder or hub name of the original model."
        )
    known = {token: i for i, token in enumerate(tokens)}
    plain = {
        token: i for token, i in known.items() if types[i] not in (_CONTROL, _USER_DEFINED, _BYTE)
    }
    order = sorted(plain, key=lambda token: -scores[plain[token]])
    unknown = _token_id(model, "unknown", tokens)
    return models.BPE(
        vocab=known,
        merges=[merge for token in order for merge in _merges(token, plain)],
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )


def _merges(token: str, known: dict[str, int]) -> list[tuple[str, str]]:
    """Return the pairs of known tokens that make a token."""
    cuts = [i for i in range(1, len(token)) if token[:i] in known and token[i:] in known]
    pairs = [(token[:i], token[i:]) for i in cuts]
    if len(pairs) > 1:
        pairs.sort(key=lambda pair: (known[pair[0]], known[pair[1]]))
    return pairs


def _replace_spaces(backend: Backend, *, has_prefix: bool) -> None:
    """Put `▁` for spaces and, with a prefix, before each run of text without special tokens."""
    from tokenizers import decoders, normalizers

    replace = normalizers.Replace(" ", "▁")
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), replace]) if has_prefix else replace
    )
    strip = [decoders.Strip(content=" ", left=1)] if has_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )


def _add_ends(backend: Backend, model: GGUF, tokens: list[str]) -> None:
    """Add the tokens that begin and end a text."""
    from tokenizers import processors

    is_sentencepiece = model.get("tokenizer.ggml.model", str) == "llama"
    adds_bos = is_sentencepiece or model.get("tokenizer.ggml.pre", str) in _ADDS_BOS
    before, after = (
        token
        if _flag(model, f"add_{key}_token", default)
        and (token := _token_id(model, key, tokens)) is not None
        else None
        for key, default in (("bos", adds_bos), ("eos", False))
    )
    if before is None and after is None:
        return
    first = [] if before is None else ["bos"]
    last = [] if after is None else ["eos"]
    backend.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[
            *first,
            "$A",
            *last,
            *(f"{name}:1" for name in first),
            "$B:1",
            *(f"{n}:1" for n in last),
        ],
        special_tokens=[
            {"id": name, "ids": [token], "tokens": [tokens[token]]}
            for name, token in (("bos", before), ("eos", after))
            if token is not None
        ],
    )
