"""Drafters: what they combine with, and the models that some of them run."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from toolkit.config import EngineConfig, ModelConfig, Speculation
from toolkit.distributed import Group, parallel
from toolkit.errors import ConfigError
from toolkit.lora.tokenizer import require_same_vocabulary
from toolkit.models.build import build_model, choose_dtype, load_config
from toolkit.models.cache_scale import scale_cache
from toolkit.models.decoder import Decoder
from toolkit.models.describe import Encoder
from toolkit.models.model import CausalLM, Model
from toolkit.models.model_config import ArchitectureConfig
from toolkit.models.registry import describe, has_head
from toolkit.speculative.draft_model import DraftModel
from toolkit.speculative.model_drafter import Network
from toolkit.weights.loader import find_weights


@dataclass(frozen=True, slots=True)
class Target:
    """The model whose tokens are guessed."""

    folder: Path
    config: ArchitectureConfig
    dtype: torch.dtype
    device: torch.device
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """The model of a drafter."""

    model: Model
    network: Network
    most: int  # drafts of a row
    limit: int  # positions that it can compute

    def spare_blocks(self, block_size: int) -> int:
        """Return how many blocks a row needs for the positions of drafts."""
        return -(-self.most // block_size)


def check(config: EngineConfig, target: Target) -> Speculation | None:
    """Return the settings of the drafter, None without one. Raises ConfigError."""
    wanted = config.speculation.drafter
    if wanted is None:
        return None
    name, described = target.config.architectures[0], describe(target.config)
    problem = None
    if isinstance(described, Encoder) or not has_head(target.config):
        problem = f"{name} generates no text"
    elif target.device.type != "cpu":
        problem = "speculative decoding runs on CPUs only so far"
    elif wanted.model is not None and config.parallel.pipeline_parallel_size > 1:
        problem = f"the method {wanted.method} does not support --pipeline-parallel-size"
    if problem is not None:
        raise _error(problem)
    return wanted


def find_loader(
    config: EngineConfig, wanted: Speculation | None, target: Target, group: Group
) -> DraftModelLoader | None:
    """Return the loader of the drafter's model, None if it has none. Raises ToolkitError."""
    if wanted is None or wanted.model is None:
        return None
    return DraftModelLoader(config, wanted, target, group)


class DraftModelLoader:
    """Loads a decoder as drafter. --quantization, --dtype and the cache's type hold for it, too."""

    def __init__(
        self, config: EngineConfig, wanted: Speculation, target: Target, group: Group
    ) -> None:
        """Read its configuration. Raises ToolkitError."""
        assert wanted.model is not None
        self._config, self._target, self._group = config, target, group
        self._most = wanted.num_speculative_tokens
        self.folder, given = Path(wanted.model), config.model
        self._model_config = load_config(
            self.folder,
            ModelConfig(
                model_impl=given.model_impl,
                trust_remote_code=given.trust_remote_code,
                load_format=given.load_format,
            ),
        )
        described = describe(self._model_config)
        if isinstance(described, Encoder) or not has_head(self._model_config):
            raise _error(f"{self.folder} ({self._model_config.architectures[0]}) generates no text")
        choose_dtype(str(target.dtype).removeprefix("torch."), self._model_config, target.device)
        tokenizer = given.tokenizer
        require_same_vocabulary(
            self.folder, target.folder if tokenizer is None else Path(tokenizer)
        )
        # 0: config.json does not say.
        self._limit = min(target.max_model_len, described.max_positions or target.max_model_len)
        self.nbytes = self._build(torch.device("meta"), 1).nbytes

    def load(self, target: Model) -> Loaded:
        """Build it, with its weights."""
        model, given = self._build(self._target.device, self._limit), self._config.model
        assert isinstance(model, CausalLM)
        find_weights(model, self.folder, given.load_format, given.seed)(threading.Event())
        if self._config.cache.kv_cache_dtype == "fp8" and isinstance(model, Decoder):
            scale_cache(model)
        model.pack_weights()
        if self._config.device.enforce_eager:
            model.disable_recording()
        return Loaded(model, DraftModel(model, target.vocab_size), self._most, self._limit)

    def _build(self, device: torch.device, max_model_len: int) -> Model:
        quantization = self._config.model.quantization
        with parallel(self._group):
            return build_model(
                self._model_config,
                device=device,
                dtype=self._target.dtype,
                max_model_len=max_model_len,
                quantization=None if self._model_config.packings else quantization,
                target=self._target.device,
            )


def _error(problem: str) -> ConfigError:
    return ConfigError(f"--speculative-config: {problem}.", param="speculative_config")
