"""What becomes of a prompt that is not continued: how its hidden states become one vector, as the model's folder says.

A folder of sentence-transformers lists its parts in modules.json: the transformer, then Pooling, and perhaps Dense and
Normalize, each with a folder of its own (https://sbert.net/docs/sentence_transformer/usage/custom_models.html).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from toolkit.errors import CheckpointError

MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "lasttoken")
"""Ways from the hidden states of a prompt to one; a model that has several puts their results side by side."""
_OLD_NAMES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""In the order in which results were put side by side."""
_NO_LIMIT = 10**9
"""Tokenizers without a limit have a greater one."""


class PoolingInfo(msgspec.Struct, kw_only=True):
    """What a model that pools tells of itself."""

    task: str
    """`embed`: a vector for a text. `score`: a number for a pair of texts."""
    size: int
    """Numbers in a vector."""
    normalizes: bool = False
    """Whether vectors have the length 1."""
    dimensions: list[int] | None = None
    """What vectors may be cut to (Kusupati et al., 2022); empty: any size; None: the model was not made for it."""


class Dense(msgspec.Struct, frozen=True):
    """A layer behind the pooling."""

    folder: str
    in_features: int
    out_features: int
    bias: bool
    activation: str
    """The name of a class of torch.nn."""


class PoolingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How hidden states become a vector: the modes, the layers behind them, and whether its length is made 1."""

    modes: tuple[str, ...]
    dense: tuple[Dense, ...] = ()
    normalize: bool = True
    max_seq_length: int | None = None
    """Tokens that the folder wants a text cut to."""


def has_pooling(folder: Path) -> bool:
    """Whether the folder says how its model pools."""
    return (folder / "modules.json").is_file()


def read_pooling(folder: Path, mode: str | None, default: str) -> PoolingConfig:
    """`mode` replaces the folder's own; `default`: the mode where neither says. Raises CheckpointError for what cannot be
    read or is not supported.
    """
    try:
        config = _read_modules(folder) if has_pooling(folder) else PoolingConfig(modes=(default,))
    except CheckpointError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{folder / 'modules.json'} cannot be used: {error!r}") from None
    return config if mode is None else msgspec.structs.replace(config, modes=(mode,))


def matryoshka(folder: Path) -> list[int] | None:
    """The sizes that config.json says embeddings may be cut to, as `PoolingInfo.dimensions`."""
    raw = _json(folder / "config.json")
    listed = raw.get("matryoshka_dimensions")
    if listed:
        return sorted(int(size) for size in listed)
    return [] if raw.get("is_matryoshka") else None


def _read_modules(folder: Path) -> PoolingConfig:
    modes: tuple[str, ...] = ()
    dense: list[Dense] = []
    normalize = False
    for module in json.loads((folder / "modules.json").read_text()):
        kind, path = module["type"].rpartition(".")[2], module["path"]
        if path.startswith("/") or ".." in Path(path).parts:
            raise CheckpointError(
                f"{folder / 'modules.json'} names {path}, which is not in its own folder."
            )
        if kind == "Pooling":
            modes = _modes(folder / path)
        elif kind == "Dense":
            dense.append(_dense(folder, path))
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise CheckpointError(
                f"{folder / 'modules.json'} has the module {kind}, which tk does not run. It runs Transformer, Pooling, "
                f"Dense and Normalize."
            )
    if not modes:
        raise CheckpointError(f"{folder / 'modules.json'} has no Pooling module.")
    return PoolingConfig(
        modes=modes, dense=tuple(dense), normalize=normalize, max_seq_length=_max_seq_length(folder)
    )


def _modes(folder: Path) -> tuple[str, ...]:
    raw = json.loads((folder / "config.json").read_text())
    named = raw.get("pooling_mode") or [mode for key, mode in _OLD_NAMES.items() if raw.get(key)]
    modes = [named] if isinstance(named, str) else named or ["mean"]
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown:
        raise CheckpointError(
            f"{folder / 'config.json'} has the pooling {', '.join(unknown)}; tk has {', '.join(MODES)}."
        )
    return tuple(modes)


def _dense(folder: Path, path: str) -> Dense:
    raw = json.loads((folder / path / "config.json").read_text())
    activation = raw.get("activation_function", "Tanh").rpartition(".")[2]
    return Dense(path, raw["in_features"], raw["out_features"], raw.get("bias", True), activation)


def _max_seq_length(folder: Path) -> int | None:
    """The least of what the files say; newer folders say it of the tokenizer."""
    said = (
        _json(folder / "sentence_bert_config.json").get("max_seq_length"),
        _json(folder / "tokenizer_config.json").get("model_max_length"),
    )
    return min((int(length) for length in said if length and length < _NO_LIMIT), default=None)


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found
