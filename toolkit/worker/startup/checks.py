"""Checks of the settings against the model and the device, before memory is taken."""

from dataclasses import dataclass
from pathlib import Path

from toolkit.config import EngineConfig, Speculation
from toolkit.distributed import SINGLE, SINGLE_STAGE, Group
from toolkit.kernels.table import kernels_for
from toolkit.models.model import CausalLM, Encoder
from toolkit.pooling.heads import check_encoder
from toolkit.sampling.processor_rows import Loaded, load_processors
from toolkit.worker.adapter_reading import AdapterReader
from toolkit.worker.startup import drafters
from toolkit.worker.startup.devices import choose_device
from toolkit.worker.startup.model_loader import ModelLoader
from toolkit.worker.startup.runners import choose_attention
from toolkit.worker.startup.setup import Place, Setup, read_setup


@dataclass(frozen=True, slots=True)
class Loaders:
    """Loaders of a model and its drafter, and logits processors. All settings are checked."""

    model: ModelLoader
    speculation: Speculation | None
    drafter: drafters.Loader | None  # None: the drafter, if there is one, has no model
    processors: Loaded


def find_loaders(setup: Setup) -> Loaders:
    """Return the loaders. Raises ToolkitError for settings that model or device do not support."""
    speculation = drafters.check(setup)
    drafter = drafters.find_loader(setup, speculation)
    model = ModelLoader(setup)
    processors: Loaded = {}
    if isinstance(model.sketch, CausalLM):
        choose_attention(setup, model.sketch)
        vocab_size = model.sketch.vocab_size
        processors = load_processors(setup.config.plugins, setup.device, vocab_size)
    elif isinstance(model.sketch, Encoder):
        check_encoder(model.sketch, setup.config)
    return Loaders(model, speculation, drafter, processors)


def check_start(config: EngineConfig, folder: Path) -> None:
    """Raise the ToolkitError that the start of a worker here would raise, apart from memory.

    Reads --lora-modules, and nothing else of any weights."""
    device, group = choose_device(config.device.device, None), config.parallel.tensor_parallel_size
    place = Place(device, kernels_for(device), None, SINGLE, Group(0, group), SINGLE_STAGE, 0)
    loaders = find_loaders(read_setup(config, folder, place))
    if config.lora.adapters:
        AdapterReader(loaders.model.sketch_adapters(), config, folder).read_modules()
