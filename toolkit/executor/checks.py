"""Check settings before a start: above all, that a model can be split over the ranks."""

from pathlib import Path

import torch

from toolkit.config import EngineConfig
from toolkit.distributed import Group, parallel
from toolkit.errors import ConfigError
from toolkit.models.build import build_model, load_config
from toolkit.models.config.registry import describe
from toolkit.models.describe import Decoder, Encoder
from toolkit.models.pipeline_split import split_layers
from toolkit.worker.startup.checks import check_start

MOST = 64  # sizes to try for the list of possible ones


def check_settings(config: EngineConfig, folder: Path) -> None:
    """Raise the ToolkitError of a start for settings that model or device do not support.

    Needs no weights but those of --lora-modules. Devices of a Ray cluster are not checked."""
    if config.parallel.world_size > 1:
        require_size(config, folder)
    if config.parallel.distributed_executor_backend == "mp":
        check_start(config, folder)


def require_size(config: EngineConfig, folder: Path) -> None:
    """Raise ConfigError, with the possible sizes, for a size that cannot work.

    That is more ranks than GPUs, more stages than layers, or heads and features that do not divide.
    """
    wanted, num_stages = (
        config.parallel.tensor_parallel_size,
        config.parallel.pipeline_parallel_size,
    )
    sizes = {"tensor_parallel_size": wanted, "pipeline_parallel_size": num_stages}
    flags = [f"--{name.replace('_', '-')} {size}" for name, size in sizes.items() if size > 1]
    asked, param = (
        " times ".join(flags),
        "tensor_parallel_size" if wanted > 1 else "pipeline_parallel_size",
    )
    here = config.device.device != "cpu" and config.parallel.distributed_executor_backend == "mp"
    gpus = torch.cuda.device_count() if here else 0
    if gpus and config.parallel.world_size > gpus:
        raise ConfigError(f"{asked} needs as many GPUs, and PyTorch sees {gpus} here.", param=param)
    model_config = load_config(folder, config.model)
    description = describe(model_config)
    if isinstance(description, Encoder):
        if config.parallel.world_size == 1:
            return
        raise ConfigError(f"{asked}: encoders run on one device only.", param=param)
    if isinstance(description, Decoder):
        split_layers(description.num_layers, num_stages, 1, 1, description.num_sharing)
    elif num_stages > 1:
        raise ConfigError(
            f"{asked}: models that run through Transformers have one stage only. Use "
            f"--tensor-parallel-size.",
            param="pipeline_parallel_size",
        )
    problem = _problem(config, folder, wanted)
    if problem is not None:
        heads = getattr(model_config, "num_attention_heads", 0)
        divisors = [size for size in range(1, (gpus or MOST) + 1) if heads % size == 0]
        fits = [size for size in divisors if _problem(config, folder, size) is None]
        possible = f" Possible sizes: {', '.join(map(str, fits))}." if fits else ""
        raise ConfigError(problem + possible, param="tensor_parallel_size")


def _problem(config: EngineConfig, folder: Path, size: int) -> str | None:
    """Return why a size is impossible: the error from building the model without memory."""
    try:
        splits_experts = not config.parallel.enable_expert_parallel
        with parallel(Group(0, size), splits_experts=splits_experts):
            build_model(
                load_config(folder, config.model),
                device=torch.device("meta"),
                dtype=torch.float32,
                max_model_len=1,
            )
    except ConfigError as error:
        return error.message
    return None
