"""Read a checkpoint's config.json and build its model. `weights.loader` loads the weights."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import CheckpointError
from toolkit.models.model_config import ArchitectureConfig, auto_dtype, parse_config
from toolkit.models.registry import SUPPORTED, Model, has_head, resolve_architecture
from toolkit.weights.quantization import quantized

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_config(folder: Path) -> ArchitectureConfig:
    """Read a folder's config.json. Raises CheckpointError if it is unreadable or unsupported."""
    try:
        raw = json.loads((folder / "config.json").read_text())
        if not isinstance(raw, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / 'config.json'} cannot be read: {error}") from None
    if quantization := raw.get("quantization_config"):
        method = (
            quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        )
        raise CheckpointError(
            f"The weights in {folder} are already quantized ({method}), which tk does not support. "
            f"Use the original model with --quantization fp8 (GPU) or int8 (CPU)."
        )
    if not set(raw.get("architectures") or []) & set(SUPPORTED):
        resolve_architecture(_Named(raw.get("architectures"), raw.get("model_type")), str(folder))

    try:
        config = parse_config(raw)
    except ValueError as error:
        raise CheckpointError(f"{folder / 'config.json'} cannot be used: {error}.") from None
    if not has_head(config):
        config.tie_word_embeddings = True  # the head is unused; tied, it takes no memory
    return config


class _Named:
    def __init__(self, architectures: Any, model_type: Any) -> None:
        self.architectures, self.model_type = architectures, model_type


def choose_dtype(wanted: str, config: ArchitectureConfig, device: torch.device) -> torch.dtype:
    """Return the type for --dtype `wanted`. `auto_dtype` decides for auto."""
    return DTYPES[auto_dtype(config, on_gpu=device.type == "cuda") if wanted == "auto" else wanted]


def build_model(
    config: Any,
    folder: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int,
    quantization: str | None = None,
) -> Model:
    """Build a model with uninitialized parameters. `quantization`: of its linear layers."""
    with device, _default_dtype(dtype), quantized(quantization), torch.inference_mode():
        model = resolve_architecture(config, str(folder))(config, max_model_len)
    return model.eval()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
