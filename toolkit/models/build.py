"""Read a checkpoint's config.json and build its model. `weights.loader` loads the weights."""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from toolkit.config import ModelConfig
from toolkit.ctranslate2.file import is_ctranslate2
from toolkit.distributed import splits_experts
from toolkit.errors import CheckpointError, ConfigError
from toolkit.gguf.folder import is_gguf
from toolkit.models import describe as describe_
from toolkit.models.config.model_config import ArchitectureConfig, resolve_dtype
from toolkit.models.config.overrides import read_config
from toolkit.models.config.registry import describe, find_problem, parse_config, supported
from toolkit.models.config.wrapped import text_config
from toolkit.models.decoder import Decoder
from toolkit.models.fallback.config import NOT_THROUGH_TRANSFORMERS, FallbackConfig
from toolkit.models.model import Model, default_dtype
from toolkit.weights.formats import QUANTIZATION_FIELDS, Packings, read_packings
from toolkit.weights.gguf import packing as gguf
from toolkit.weights.loading.loader import stored_tensors
from toolkit.weights.quantization import quantized

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


DEFAULTS = ModelConfig()


def load_config(folder: Path, settings: ModelConfig = DEFAULTS) -> ArchitectureConfig:
    """Read a folder's config.json. Raises CheckpointError if it is unreadable or unsupported."""
    raw = read_config(folder, settings.overrides)
    path = folder if is_gguf(folder) else folder / "config.json"
    other = "a GGUF file" if is_gguf(folder) else "CTranslate2's" * is_ctranslate2(folder)
    if other and settings.model_impl == "transformers":
        raise ConfigError(
            f"--model-impl transformers: Transformers cannot run {folder}, {other}. Use the "
            f"original model.",
            param="model_impl",
        )
    problem = find_problem(raw, settings.model_impl)
    if problem is not None:
        names = supported()
        # Those of LlamaModel embed what LlamaForCausalLM generates from.
        shown = [one for one in names if f"{one.removesuffix('Model')}ForCausalLM" not in names]
        raise CheckpointError(f"{path}: {problem}. Supported: {', '.join(shown)}.")
    try:
        config = parse_config(raw, settings.model_impl)
        config.packings = _read_packings(folder, raw, config, settings)
        if config.reads_shapes and settings.load_format != "dummy":
            config.read_shapes({one.name: one.shape for one in stored_tensors(folder)})
    except ConfigError:  # a ValueError, too
        raise
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be used: {error}.") from None
    if isinstance(config, FallbackConfig):
        config.folder, config.trust_remote_code = folder, settings.trust_remote_code
        import_module("toolkit.models.fallback.build").find_class(config)  # heavy
    return config


def _read_packings(
    folder: Path, raw: dict[str, Any], config: ArchitectureConfig, settings: ModelConfig
) -> Packings | None:
    """Return how a quantized checkpoint stores its weights, or None.

    Raises ValueError for an unsupported format, ConfigError if it would be quantized again."""
    reads = settings.load_format != "dummy" or is_gguf(folder)
    raw = text_config(raw)
    quantized = is_gguf(folder) or any(raw.get(name) for name in QUANTIZATION_FIELDS)
    header = {one.name: one for one in stored_tensors(folder)} if reads and quantized else {}
    packings = gguf.packings(header) if is_gguf(folder) else read_packings(raw, header)
    if packings is None:
        return None
    if isinstance(config, FallbackConfig):
        raise ValueError(NOT_THROUGH_TRANSFORMERS)
    if settings.quantization is not None:
        raise ConfigError(
            f"--quantization {settings.quantization}: the weights in {folder} are already "
            f"quantized ({packings.method}). Leave it out.",
            param="quantization",
        )
    return packings


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
    target: torch.device | None = None,
) -> Model:
    """Build a model with uninitialized parameters.

    `quantization`: of its linear layers, see --quantization; `target`: the device that it is for,
    if it is built on another."""
    description = describe(config)
    has_experts = isinstance(description, describe_.Decoder) and description.has_experts
    if not has_experts and not splits_experts():
        raise ConfigError(
            "--enable-expert-parallel: the model has no experts that tk splits. Leave it out.",
            param="enable_expert_parallel",
        )
    formats = quantized(quantization, config.packings, target)
    with device, default_dtype(dtype), formats, torch.inference_mode():
        model: Model
        if isinstance(description, describe_.Decoder):
            model = Decoder(description, max_model_len)
        else:
            module, _, name = description.model.partition(":")
            length = [max_model_len] if isinstance(description, describe_.External) else []
            model = getattr(import_module(module), name)(config, description, *length)
        model.architecture = config.architectures[0]
    return model.eval()
