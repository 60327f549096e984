"""Drafters: what they combine with, and the models that some of them run."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from toolkit.config import ModelConfig, Speculation
from toolkit.distributed import parallel
from toolkit.errors import ConfigError
from toolkit.lora.tokenizer import require_same_vocabulary
from toolkit.models.build import build_model, choose_dtype, load_config
from toolkit.models.cache_scale import scale_cache
from toolkit.models.config.overrides import read_config
from toolkit.models.config.registry import describe, has_head
from toolkit.models.decoder import Decoder
from toolkit.models.describe import Decoder as Described
from toolkit.models.describe import Encoder
from toolkit.models.eagle import (
    EAGLE3_TENSORS,
    EAGLE_TENSORS,
    Eagle,
    Eagle3,
    describe_eagle,
    describe_own_layer,
)
from toolkit.models.memory import RowMemory
from toolkit.models.model import CausalLM, Model
from toolkit.speculative.eagle import EagleModel, EagleNetwork, build_eagle, taps_of
from toolkit.speculative.network import DraftModel, Network
from toolkit.weights.formats import Packings, read_packings
from toolkit.weights.loading.loader import find_weights, stored_tensors, tensor_names
from toolkit.worker.graph_policy import GraphPolicy
from toolkit.worker.startup.setup import Setup


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


def check(setup: Setup) -> Speculation | None:
    """Return the settings of the drafter, None without one. Raises ConfigError."""
    config, wanted = setup.config, setup.config.speculation.drafter
    if wanted is None:
        return None
    name, described = setup.model_config.architectures[0], describe(setup.model_config)
    problem = None
    if isinstance(described, Encoder) or not has_head(setup.model_config):
        problem = f"{name} generates no text"
    elif any(isinstance(one, RowMemory) and not one.takes_drafts for one in described.memory):
        problem = f"layers of {name} keep a state for each request, which drafts would change"
    elif setup.device.type != "cpu" and setup.place.triton is None:
        problem = "on GPUs it needs the package triton"
    elif wanted.method != "ngram" and config.parallel.pipeline_parallel_size > 1:
        problem = (
            f"the method {wanted.method} does not support --pipeline-parallel-size, ngram does"
        )
    if problem is not None:
        raise _error(problem)
    return wanted


def find_loader(setup: Setup, wanted: Speculation | None) -> Loader | None:
    """Return the loader of the drafter's model, None if it has none. Raises ToolkitError."""
    if wanted is None or wanted.method == "ngram":
        return None
    kind = DraftModelLoader if wanted.method == "draft_model" else EagleLoader
    return kind(setup, wanted)


class Loader(Protocol):
    """Loads the model of a drafter."""

    nbytes: int  # of its weights

    def load(self, target: Model) -> Loaded:
        """Build it, with its weights, for a model that has its own."""


class DraftModelLoader:
    """Loads a decoder as drafter. --quantization, --dtype and the cache's type hold for it, too."""

    def __init__(self, setup: Setup, wanted: Speculation) -> None:
        """Read its configuration. Raises ToolkitError."""
        assert wanted.model is not None
        self._setup = setup
        self._most = wanted.num_speculative_tokens
        self.folder, given = Path(wanted.model), setup.config.model
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
        if any(isinstance(one, RowMemory) for one in described.memory):
            raise _error(
                f"{self.folder}: layers of {self._model_config.architectures[0]} keep a state for "
                "each request, and a model that drafts has none of its own"
            )
        choose_dtype(str(setup.dtype).removeprefix("torch."), self._model_config, setup.device)
        tokenizer = given.tokenizer
        require_same_vocabulary(self.folder, setup.folder if tokenizer is None else Path(tokenizer))
        # 0: config.json does not say.
        self._limit = min(setup.max_model_len, described.max_positions or setup.max_model_len)
        self.nbytes = self._build(torch.device("meta"), 1).nbytes

    def load(self, target: Model) -> Loaded:
        model, given = self._build(self._setup.device, self._limit), self._setup.config.model
        assert isinstance(model, CausalLM)
        find_weights(model, self.folder, given.load_format, given.seed)(threading.Event())
        if self._setup.config.cache.kv_cache_dtype == "fp8" and isinstance(model, Decoder):
            scale_cache(model)
        if self._setup.device.type == "cpu":
            model.pack_weights()
            if self._setup.config.device.enforce_eager:
                model.disable_recording()
        return Loaded(model, DraftModel(model, target.vocab_size), self._most, self._limit)

    def _build(self, device: torch.device, max_model_len: int) -> Model:
        quantization = self._setup.config.model.quantization
        with parallel(self._setup.place.group):
            return build_model(
                self._model_config,
                device=device,
                dtype=self._setup.dtype,
                max_model_len=max_model_len,
                quantization=None if self._model_config.packings else quantization,
                target=self._setup.device,
            )


class EagleLoader:
    """Loads the network of EAGLE or EAGLE-3, or the layer of the model that drafts."""

    def __init__(self, setup: Setup, wanted: Speculation) -> None:
        """Read its configuration. Raises ToolkitError."""
        self._setup = setup
        self._most = wanted.num_speculative_tokens
        described = describe(setup.model_config)
        if not isinstance(described, Described):
            raise _error(
                f"the method {wanted.method} reads hidden states, which tk does not have of "
                f"{setup.model_config.architectures[0]}: Transformers computes it"
            )
        if wanted.model is None:
            self.folder, self._packings = setup.folder, setup.model_config.packings
            self._described: Eagle = self._find_own_layer(described)
        else:
            self.folder = Path(wanted.model)
            self._described, self._packings = self._read(wanted, described)
        self._hidden_size = described.hidden_size
        self._require_fit(described)
        self.nbytes = self._build(torch.device("meta"), 1).nbytes

    def _find_own_layer(self, model: Described) -> Eagle:
        name = self._setup.model_config.architectures[0]
        load_format = self._setup.config.model.load_format
        found = describe_own_layer(model)
        if found is None:
            raise _error(f"{name} has no layer that drafts, or tk does not know it")
        own = found.own.product.name
        if load_format != "dummy" and not any(
            tensor.startswith(own) for tensor in tensor_names(self.folder, load_format)
        ):
            raise _error(
                f"{self.folder} has no tensors of the layer that drafts ({own}): they were left "
                "out. Use another checkpoint of the model"
            )
        return found

    def _read(self, wanted: Speculation, model: Described) -> tuple[Eagle, Packings | None]:
        raw, load_format = read_config(self.folder), self._setup.config.model.load_format
        is_third = wanted.method == "eagle3"
        names = EAGLE3_TENSORS if is_third else EAGLE_TENSORS
        if load_format != "dummy":
            names = frozenset(tensor_names(self.folder, load_format))
        try:
            found = describe_eagle(raw, names, len(model.layers), is_third=is_third)
            stored = stored_tensors(self.folder) if load_format != "dummy" else []
            return found, read_packings(raw, {one.name: one for one in stored})
        except ValueError as error:
            raise _error(f"{self.folder} cannot be used: {error}") from None

    def load(self, target: Model) -> Loaded:
        assert isinstance(target, Decoder)
        given, limit = self._setup.config.model, self._setup.max_model_len
        model = self._build(self._setup.device, limit)
        find_weights(model, self.folder, given.load_format, given.seed)(threading.Event())
        if self._setup.device.type == "cpu":
            model.pack_weights()
        network = EagleNetwork(model, target, taps_of(self._described))
        return Loaded(model, network, self._most, limit)

    def _require_fit(self, target: Described) -> None:
        """Raise ConfigError if it cannot have been made for the model."""
        own, name = self._described, self._setup.model_config.architectures[0]
        shares = not (isinstance(own, Eagle3) and own.has_embedding)
        if shares and own.hidden_size != target.hidden_size:
            raise _error(
                f"{self.folder} has hidden size {own.hidden_size}, and {self._setup.folder} "
                f"({name}) {target.hidden_size}. Use a drafter that was trained for this model"
            )
        if not shares and own.vocab_size < target.vocab_size:
            raise _error(
                f"{self.folder} has embeddings of {own.vocab_size} tokens, and "
                f"{self._setup.folder} ({name}) {target.vocab_size} tokens"
            )

    def _build(self, device: torch.device, max_model_len: int) -> EagleModel:
        quantization = self._setup.config.model.quantization
        with parallel(self._setup.place.group):
            return build_eagle(
                self._described,
                self._hidden_size,
                device=device,
                dtype=self._setup.dtype,
                max_model_len=max_model_len,
                quantization=None if self._packings else quantization,
                packings=self._packings,
                target=self._setup.device,
            )


def no_room_error(policy: GraphPolicy) -> ConfigError:
    """Return the error of steps that have no room for drafts."""
    return _error(
        f"a step of {policy.max_num_tokens} tokens has no room for drafts next to a token of each "
        f"of {policy.max_num_seqs} requests. Raise --max-num-batched-tokens, or lower "
        "--max-num-seqs"
    )


def _error(problem: str) -> ConfigError:
    return ConfigError(f"--speculative-config: {problem}.", param="speculative_config")
