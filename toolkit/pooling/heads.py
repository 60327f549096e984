"""Choose the pooling head of a model from its folder and the settings."""

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from toolkit.config import EngineConfig
from toolkit.errors import CheckpointError, ConfigError
from toolkit.models.architectures import bert
from toolkit.models.config.model_config import ArchitectureConfig
from toolkit.models.config.registry import has_head
from toolkit.models.model import CausalLM, Encoder, Model, Scorer
from toolkit.pooling.accumulator import PromptPooling
from toolkit.pooling.pooler import Pooler, activation, load_pooler
from toolkit.pooling.settings import (
    PoolingConfig,
    PoolingInfo,
    has_pooling,
    matryoshka,
    read_pooling,
)

Head = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps (hidden [num_tokens, hidden], prompt lengths [n] int64) to vectors [n, size], fp32."""

logger = logging.getLogger(__name__)

DECODER_MODES = ("lasttoken", "mean", "cls")
_MODE_OF = {"last": "lasttoken", "mean": "mean", "cls": "cls", None: None}
"""Modes by value of --pooling."""


def max_seq_length(folder: Path) -> int | None:
    """Return an embedding model's limit on tokens per text, or None."""
    return read_pooling(folder, None, "mean").max_seq_length if has_pooling(folder) else None


def check_encoder(model: Encoder, config: EngineConfig) -> None:
    """Raise ConfigError for settings that an encoder lacks."""
    for name, value in (
        ("attention_backend", config.device.attention_backend),
        ("kv_cache_dtype", config.cache.kv_cache_dtype),
    ):
        if value != "auto":
            raise ConfigError(
                f"--{name.replace('_', '-')} is for models with a KV cache. This one is an encoder "
                f"and has none.",
                param=name,
            )
    if isinstance(model, Scorer) and config.model.pooling is not None:
        raise ConfigError(
            "--pooling is for embedding models. This one scores or classifies texts.",
            param="pooling",
        )


def encoder_head(
    model: Encoder,
    model_config: ArchitectureConfig,
    config: EngineConfig,
    folder: Path,
    device: torch.device,
) -> tuple[Head, PoolingInfo]:
    """Return the head of an encoder. Raises ToolkitError for a head that cannot be read."""
    if isinstance(model, Scorer):
        assert isinstance(model_config, bert.Config)
        scores = _scores(model, model_config.score_activation)
        labels = model_config.labels
        task = "score" if len(labels) == 1 else "classify"
        return scores, PoolingInfo(task=task, size=len(labels), labels=labels)
    pooling = read_pooling(folder, _MODE_OF[config.model.pooling], "mean")
    return _pooler(model, pooling, config, folder, device)


def decoder_pooling(
    model: CausalLM,
    model_config: ArchitectureConfig,
    config: EngineConfig,
    folder: Path,
    device: torch.device,
) -> tuple[PromptPooling, PoolingInfo] | None:
    """Return the pooling of a decoder, or None if it only generates.

    Raises CheckpointError for a mode that cannot be computed from chunks of a prompt."""
    if config.model.pooling is None and not has_pooling(folder) and has_head(model_config):
        return None
    pooling = read_pooling(folder, _MODE_OF[config.model.pooling], "lasttoken")
    if len(pooling.modes) > 1 or pooling.modes[0] not in DECODER_MODES:
        raise CheckpointError(
            f"{folder} specifies the pooling {', '.join(pooling.modes)}. For decoders tk supports "
            f"one of {', '.join(DECODER_MODES)}."
        )
    pooler, info = _pooler(model, pooling, config, folder, device)
    return PromptPooling(pooler, model.hidden_size, config.scheduler.max_num_seqs, device), info


def _pooler(
    model: Model, pooling: PoolingConfig, config: EngineConfig, folder: Path, device: torch.device
) -> tuple[Pooler, PoolingInfo]:
    with device:
        pooler = load_pooler(pooling, model.hidden_size, folder, config.model.load_format)
    logger.info(
        "pooling %s%s", ", ".join(pooling.modes), ", normalized" if pooling.normalize else ""
    )
    info = PoolingInfo(
        task="embed", size=pooler.size, normalizes=pooling.normalize, dimensions=matryoshka(folder)
    )
    return pooler, info


def _scores(model: Scorer, kind: str) -> Head:
    act = activation(kind)

    def head(hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        first = lengths.cumsum(0) - lengths
        return act(model.score(hidden[first]).float())

    return head
