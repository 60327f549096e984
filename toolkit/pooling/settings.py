"""Pooling settings in a model's folder.

A sentence-transformers folder lists its modules in modules.json: Transformer, Pooling, and
optionally Dense and Normalize, each with its own subfolder
(https://sbert.net/docs/sentence_transformer/usage/custom_models.html)."""

from pathlib import Path
from typing import Any

import msgspec

from toolkit.errors import CheckpointError
from toolkit.files import read_json

MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "lasttoken")
"""Pooling modes. A model with several concatenates their results."""
_OLD_NAMES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}  # modes by the flags of old folders, in the order of concatenation
_NO_LIMIT = 10**9  # tokenizers without a limit have a larger model_max_length


class PoolingInfo(msgspec.Struct, kw_only=True):
    """Properties of a pooling model."""

    task: str
    """`embed`: a vector for a text. `score`: a number for a pair of texts. `classify`: a number for
    each of several labels."""
    size: int  # of a vector
    labels: list[str] = []  # of the numbers of a vector, if they are scores
    normalizes: bool = False  # vectors have length 1
    dimensions: list[int] | None = None
    """Sizes that vectors can be truncated to (Matryoshka; Kusupati et al., 2022). Empty: any size.
    None: not supported."""

    @property
    def paths(self) -> str:
        """Endpoints for this task, for messages."""
        return {
            "embed": "/v1/embeddings (LLM.embed), /v1/score and /v1/rerank",
            "score": "/v1/score (LLM.score), /v1/rerank and /classify",
            "classify": "/classify",
        }[self.task]


class Dense(msgspec.Struct, frozen=True):
    """A dense layer after pooling."""

    folder: str
    in_features: int
    out_features: int
    bias: bool
    activation: str  # name of a torch.nn class


class PoolingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Pooling modes, dense layers after them, and normalization."""

    modes: tuple[str, ...]
    dense: tuple[Dense, ...] = ()
    normalize: bool = True
    max_seq_length: int | None = None  # limit on tokens per text


def has_pooling(folder: Path) -> bool:
    return (folder / "modules.json").is_file()


def read_pooling(folder: Path, mode: str | None, default: str) -> PoolingConfig:
    """Read the pooling settings. `mode` replaces the folder's; `default` if there is neither.

    Raises CheckpointError for settings that cannot be read or are not supported."""
    try:
        config = _read_modules(folder) if has_pooling(folder) else PoolingConfig(modes=(default,))
    except CheckpointError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{folder / 'modules.json'} cannot be used: {error!r}") from None
    return config if mode is None else msgspec.structs.replace(config, modes=(mode,))


def matryoshka(folder: Path) -> list[int] | None:
    """Return `PoolingInfo.dimensions` from config.json."""
    raw = _json(folder / "config.json")
    listed = raw.get("matryoshka_dimensions")
    if listed:
        return sorted(int(size) for size in listed)
    return [] if raw.get("is_matryoshka") else None


def _read_modules(folder: Path) -> PoolingConfig:
    modes: tuple[str, ...] = ()
    dense: list[Dense] = []
    normalize = False
    for module in read_json(folder / "modules.json"):
        kind, path = module["type"].rpartition(".")[2], module["path"]
        if path.startswith("/") or ".." in Path(path).parts:
            raise CheckpointError(
                f"{folder / 'modules.json'} lists {path}, which is outside its folder."
            )
        if kind == "Pooling":
            modes = _modes(folder / path)
        elif kind == "Dense":
            dense.append(_dense(folder, path))
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise CheckpointError(
                f"{folder / 'modules.json'} has the unsupported module {kind}. Supported: "
                f"Transformer, Pooling, Dense, Normalize."
            )
    if not modes:
        raise CheckpointError(f"{folder / 'modules.json'} has no Pooling module.")
    return PoolingConfig(
        modes=modes, dense=tuple(dense), normalize=normalize, max_seq_length=_max_seq_length(folder)
    )


def _modes(folder: Path) -> tuple[str, ...]:
    raw = read_json(folder / "config.json")
    named = raw.get("pooling_mode") or [mode for key, mode in _OLD_NAMES.items() if raw.get(key)]
    modes = [named] if isinstance(named, str) else named or ["mean"]
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown:
        raise CheckpointError(
            f"{folder / 'config.json'} has the unsupported pooling {', '.join(unknown)}. "
            f"Supported: {', '.join(MODES)}."
        )
    return tuple(modes)


def _dense(folder: Path, path: str) -> Dense:
    raw = read_json(folder / path / "config.json")
    activation = raw.get("activation_function", "Tanh").rpartition(".")[2]
    return Dense(path, raw["in_features"], raw["out_features"], raw.get("bias", True), activation)


def _max_seq_length(folder: Path) -> int | None:
    """Return the lowest limit in the files. Newer folders keep it in the tokenizer's config."""
    limits = (
        _json(folder / "sentence_bert_config.json").get("max_seq_length"),
        _json(folder / "tokenizer_config.json").get("model_max_length"),
    )
    return min((int(limit) for limit in limits if limit and limit < _NO_LIMIT), default=None)


def _json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = read_json(path) if path.is_file() else {}
    return content
