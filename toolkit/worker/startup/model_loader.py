"""Builds the model with its adapters, and loads its weights."""

import copy
import logging
import threading
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

import torch

from toolkit.distributed import SINGLE, SINGLE_STAGE, Group, Stage, parallel
from toolkit.errors import ConfigError
from toolkit.hardware import memory
from toolkit.lora.adapters import Adapters
from toolkit.lora.weight import Adapted
from toolkit.models.build import build_model
from toolkit.models.cache_scale import scale_cache
from toolkit.models.config.model_config import ArchitectureConfig, name_weights
from toolkit.models.config.registry import describe
from toolkit.models.decoder import Decoder
from toolkit.models.model import CausalLM, Model
from toolkit.models.tower import TowerModel
from toolkit.weights.loading.loader import find_weights
from toolkit.worker.adapter_reading import find_slot_size
from toolkit.worker.features import FeaturePlan, FeatureTable
from toolkit.worker.startup.loading import Fill, Loading
from toolkit.worker.startup.memory_budget import require_weights_fit
from toolkit.worker.startup.setup import Setup, use_stream
from toolkit.worker.startup.sounds import SoundPlan
from toolkit.worker.startup.towers import TowerPlan, find_tower_weights

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class LoadedModel:
    """This rank's part of the model."""

    model: Model
    adapters: Adapters | None
    loading: Loading | None  # set while the weights may still be loading
    num_parameters: int
    model_parameters: int  # of the unsharded model
    weight_type: str  # of most weights
    weight_bytes: int
    """Bytes of the model, its tower, its adapters and, once that is loaded, the drafter's."""
    tower: TowerModel | None = None


class ModelLoader:
    """Loads the model of one worker."""

    def __init__(self, setup: Setup) -> None:
        """Build the model without memory. Raises ToolkitError for settings that do not fit it."""
        self._setup = setup
        self.sketch = self._sketch(setup.place.stage, setup.place.group)
        self._require_hearing()
        self.sight, self.sound = TowerPlan.of(setup), SoundPlan.of(setup)
        self._require_adapters()

    def load(self, drafter_bytes: int) -> LoadedModel:
        """Return the model. On a GPU its weights may still be loading.

        `drafter_bytes`: weights of a drafter's model, which is loaded afterwards."""
        setup, place, sketch = self._setup, self._setup.place, self.sketch
        if (packings := setup.model_config.packings) is not None:
            names = [slot.rpartition(".")[0] for slot in sketch.slots()]
            layouts = packings.layouts(dict.fromkeys(names))
            logger.info("weights quantized by %s: %s", packings.method, layouts)
        num_parameters = model_parameters = self._count_parameters(sketch, place.stage, place.group)
        if place.world.size > 1:
            unsharded = self._sketch(SINGLE_STAGE, SINGLE)
            model_parameters = self._count_parameters(unsharded, SINGLE_STAGE, SINGLE)
        self._require_room(sketch.nbytes, drafter_bytes)
        with setup.explain_lack_for_weights():
            model = self._build(setup.device, setup.max_model_len, place.stage, place.group)
        everything = (
            sketch if place.stage is SINGLE_STAGE else self._sketch(SINGLE_STAGE, place.group)
        )
        weight_type = name_weights(
            describe(setup.model_config),
            packings,
            str(setup.dtype).removeprefix("torch."),
            setup.config.model.quantization,
            on_gpu=setup.device.type == "cuda",
        )
        loaded = LoadedModel(
            model, None, None, num_parameters, model_parameters, weight_type, sketch.nbytes
        )
        if setup.config.lora.is_enabled:
            self._add_adapters(loaded, everything)
        given = setup.config.model
        tensors = everything.slots()
        fill = find_weights(model, setup.folder, given.load_format, given.seed, tensors)
        if self.sight is not None and place.stage.is_first:
            fill = self._add_tower(loaded, self.sight, fill, tensors)
        # Not while a drafter's model is built: PyTorch's default dtype is that of all threads.
        if setup.device.type == "cuda" and place.world.size == 1 and not drafter_bytes:
            loaded.loading = Loading(partial(self._fill, model, fill), setup.device)
            return loaded
        # On a CPU, loading uses the main thread's PyTorch threads. Several ranks compile kernels
        # together, and each would wait for all files.
        self._fill(model, fill, threading.Event())
        if setup.device.type == "cpu":
            del fill  # refers to the unpacked weights
            model.pack_weights()
            if loaded.tower is not None:
                loaded.tower.pack_weights()
            if isinstance(model, CausalLM) and setup.config.device.enforce_eager:
                model.disable_recording()
            memory.trim_heap()
            loaded.weight_bytes = model.nbytes + (loaded.tower.nbytes if loaded.tower else 0)
        return loaded

    def features(self, loaded: LoadedModel) -> tuple[FeaturePlan, FeatureTable | None] | None:
        """Return what prompts may have, and the table of rows; None if they are text."""
        model, device = loaded.model, self._setup.device
        if self.sight is not None:
            tower = loaded.tower
            return self.sight, None if tower is None else self.sight.table(tower, device)
        if self.sound is not None and isinstance(model, Decoder):
            sound = model.sound
            return self.sound, None if sound is None else self.sound.table(sound, device)
        return None

    def _add_tower(
        self, loaded: LoadedModel, sight: TowerPlan, fill: Fill, names: Collection[str]
    ) -> Fill:
        """Build the tower. Return a function that fills both. `names`: of the decoder's tensors."""
        setup = self._setup
        with setup.explain_lack_for_weights():
            loaded.tower = tower = sight.build(setup.device, setup.dtype)
        fill_tower = find_tower_weights(setup, tower, names, loaded.model.unused)
        loaded.weight_bytes += tower.nbytes
        slots = tower.slots().values()
        num_parameters = sum(part.target.numel() for slot in slots for part in slot.parts)
        loaded.num_parameters += num_parameters
        loaded.model_parameters += num_parameters

        def fill_both(stop: threading.Event) -> None:
            fill(stop)
            fill_tower(stop)

        return fill_both

    def _sketch(self, stage: Stage, group: Group) -> Model:
        """Build a model without memory."""
        return self._build(torch.device("meta"), 1, stage, group)

    def _count_parameters(self, sketch: Model, stage: Stage, group: Group) -> int:
        """Count this part's parameters. Quantized weights have no slots of one value for each."""
        config = self._setup.model_config
        if config.packings is not None:
            plain = copy.copy(config)
            plain.packings = None
            sketch = self._build(torch.device("meta"), 1, stage, group, plain)
        return sum(part.target.numel() for slot in sketch.slots().values() for part in slot.parts)

    def _build(
        self,
        device: torch.device,
        max_model_len: int,
        stage: Stage,
        group: Group,
        model_config: ArchitectureConfig | None = None,
    ) -> Model:
        """Build a part of the model. `model_config`: other than that of the settings."""
        setup, config = self._setup, self._setup.config
        splits_experts = not config.parallel.enable_expert_parallel
        with parallel(group, stage, splits_experts=splits_experts):
            return build_model(
                model_config or setup.model_config,
                device=device,
                dtype=setup.dtype,
                max_model_len=max_model_len,
                quantization=config.model.quantization,
                target=setup.device,
            )

    def _require_room(self, weight_bytes: int, drafter_bytes: int) -> None:
        """Raise OutOfMemoryError if the weights do not fit."""
        setup, place = self._setup, self._setup.place
        together = weight_bytes + drafter_bytes
        if setup.device.type == "cpu":  # ranks on one machine share its memory
            together = (
                together * place.num_local_ranks
                if place.num_local_ranks
                else place.world.total(together)
            )
        both = ("The weights of the model and its drafter",) if drafter_bytes else ()
        require_weights_fit(together, setup.device, setup.dtype, *both)

    def _add_adapters(self, loaded: LoadedModel, everything: Model) -> None:
        """Give the model's layers adapters. `everything`: the model with all of its stages."""
        setup, model = self._setup, loaded.model
        with use_stream(setup.place.stream), setup.explain_lack_for_weights():
            loaded.adapters = self._adapters(model, everything)
        loaded.weight_bytes += sum(
            module.nbytes for module in model.modules() if isinstance(module, Adapted)
        )

    def _adapters(self, model: Model, everything: Model) -> Adapters:
        setup, (rank, ends) = self._setup, self._slot_size
        lora, kernels = setup.config.lora, setup.place.triton
        return Adapters(
            model,
            everything,
            rank,
            lora.max_loras,
            setup.dtype,
            kernels,
            ends=ends or (kernels is None and lora.lora_embeddings is not False),
        )

    def sketch_adapters(self) -> Adapters:
        """Return the adapters of the model without memory. It cannot be loaded afterwards."""
        return self._adapters(self.sketch, self._sketch(SINGLE_STAGE, self._setup.place.group))

    def _require_hearing(self) -> None:
        """Raise ConfigError for settings that do not go with an encoder of clips."""
        if not isinstance(self.sketch, Decoder):
            return
        name, encoder = self.sketch.architecture, self.sketch.encoder
        has_tower = self._setup.model_config.sound is not None
        if self._setup.config.lora.is_enabled and (has_tower or encoder is not None):
            raise ConfigError(
                f"LoRA adapters of {name} are not supported: it encodes clips apart from requests.",
                param="enable_lora",
            )
        if encoder is None:
            return
        if self._setup.config.model.pooling is not None:
            raise ConfigError(
                f"--pooling: {name} transcribes clips and has no embeddings. Leave it out.",
                param="pooling",
            )
        if self._setup.config.parallel.pipeline_parallel_size > 1:
            raise ConfigError(
                f"--pipeline-parallel-size: {name} encodes clips, and all stages would need them. "
                "Use --tensor-parallel-size.",
                param="pipeline_parallel_size",
            )

    def _require_adapters(self) -> None:
        """Raise ToolkitError if the model cannot have adapters here, or one is missing."""
        if not self._setup.config.lora.is_enabled:
            return
        if self._setup.device.type != "cpu" and self._setup.place.triton is None:
            raise ConfigError(
                "LoRA adapters on a GPU need the package triton.", param="enable_lora"
            )
        if not isinstance(self.sketch, Decoder):
            if self._setup.config.model.model_impl == "transformers":
                raise ConfigError(
                    "--model-impl transformers cannot be combined with LoRA adapters, which need "
                    "tk's own code of the model. Leave one out.",
                    param="model_impl",
                )
            raise ConfigError(
                f"LoRA adapters of {self.sketch.architecture} are not supported: it is none of "
                f"tk's own decoders.",
                param="enable_lora",
            )
        self._slot_size = find_slot_size(self._setup.config.lora)

    def _fill(self, model: Model, fill: Fill, stop: threading.Event) -> None:
        with use_stream(self._setup.place.stream), self._setup.explain_lack_for_weights():
            fill(stop)
            if self._setup.config.cache.kv_cache_dtype == "fp8" and isinstance(model, Decoder):
                scale_cache(model)
