"""Read a checkpoint's config.json and build its model. `weights.loader` loads the weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import CheckpointError
from toolkit.models import describe as describe_
from toolkit.models.decoder import Decoder
from toolkit.models.model import Model
from toolkit.models.model_config import ArchitectureConfig, resolve_dtype
from toolkit.models.overrides import NO_OVERRIDES, read_config
from toolkit.models.registry import describe, find_problem, parse_config, supported
from toolkit.weights.quantization import quantized

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_config(folder: Path, overrides: Mapping[str, Any] = NO_OVERRIDES) -> ArchitectureConfig:
    """Read a folder's config.json. `overrides`: fields to replace.

    Raises CheckpointError if it is unreadable or unsupported."""
    path, raw = folder / "config.json", read_config(folder, overrides)
    if quantization := raw.get("quantization_config"):
        method = (
            quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        )
        raise CheckpointError(
            f"The weights in {folder} are already quantized ({method}), which tk does not support. "
            f"Use the original model with --quantization fp8 (GPU) or int8 (CPU)."
        )
    problem = find_problem(raw)
    if problem is not None:
        raise CheckpointError(f"{path}: {problem}. Supported: {', '.join(supported())}.")
    try:
        return parse_config(raw)
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be used: {error}.") from None


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
    with device, _default_dtype(dtype), quantized(quantization), torch.inference_mode():
        model: Model
        if isinstance(description, describe_.Decoder):
            model = Decoder(description, max_model_len)
        else:
            module, _, name = description.model.partition(":")
            model = getattr(import_module(module), name)(config, description)
        model.architecture = config.architectures[0]
    return model.eval()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
