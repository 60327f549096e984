"""Read a checkpoint's config.json and build its model. `weights.loader` loads the weights."""

from importlib import import_module
from pathlib import Path

import torch

from toolkit.config import ModelConfig
from toolkit.errors import CheckpointError
from toolkit.models import describe as describe_
from toolkit.models.decoder import Decoder
from toolkit.models.fallback.config import FallbackConfig
from toolkit.models.model import Model, default_dtype
from toolkit.models.model_config import ArchitectureConfig, resolve_dtype
from toolkit.models.overrides import read_config
from toolkit.models.registry import describe, find_problem, parse_config, supported
from toolkit.weights.quantization import quantized

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


DEFAULTS = ModelConfig()


def load_config(folder: Path, settings: ModelConfig = DEFAULTS) -> ArchitectureConfig:
    """Read a folder's config.json. Raises CheckpointError if it is unreadable or unsupported."""
    path, raw = folder / "config.json", read_config(folder, settings.overrides)
    if quantization := raw.get("quantization_config"):
        method = (
            quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        )
        raise CheckpointError(
            f"The weights in {folder} are already quantized ({method}), which tk does not support. "
            f"Use the original model with --quantization fp8 (GPU) or int8 (CPU)."
        )
    problem = find_problem(raw, settings.model_impl)
    if problem is not None:
        raise CheckpointError(f"{path}: {problem}. Supported: {', '.join(supported())}.")
    try:
        config = parse_config(raw, settings.model_impl)
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be used: {error}.") from None
    if isinstance(config, FallbackConfig):
        config.folder, config.trust_remote_code = folder, settings.trust_remote_code
        import_module("toolkit.models.fallback.build").find_class(config)  # heavy
    return config


def choose_dtype(wanted: str, config: ArchitectureConfig, device: torch.device) -> torch.dtype:
    """Return the type for --dtype `wanted`. Raises ConfigError as `resolve_dtype` does."""
    return DTYPES[resolve_dtype(wanted, config, on_gpu=device.type == "cuda")]


def build_model(
    config: ArchitectureConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int,
    quantization: str | None = None,
) -> Model:
    """Build a model with uninitialized parameters. `quantization`: of its linear layers."""
    description = describe(config)
    with device, default_dtype(dtype), quantized(quantization), torch.inference_mode():
        model: Model
        if isinstance(description, describe_.Decoder):
            model = Decoder(description, max_model_len)
        else:
            module, _, name = description.model.partition(":")
            length = [max_model_len] if isinstance(description, describe_.External) else []
            model = getattr(import_module(module), name)(config, description, *length)
        model.architecture = config.architectures[0]
    return model.eval()
