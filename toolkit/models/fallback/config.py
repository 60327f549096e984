"""Read config.json of a model without a description. Imports no torch.

Names of its fields differ between architectures; those read here are for memory estimates and
limits. What the model computes is Transformers' to read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from toolkit.models.config.model_config import ArchitectureConfig
from toolkit.models.describe import External
from toolkit.models.memory import TokenMemory

_SYNONYMS: dict[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size", "n_vocab"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim", "embed_dim"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "head_dim": ("head_dim", "d_kv", "kv_channels", "attention_head_dim"),
    "max_positions": (
        "max_position_embeddings",
        "n_positions",
        "max_sequence_length",
        "max_seq_len",
        "n_ctx",
        "seq_length",
    ),
}
_ENDS = ("ForCausalLM", "LMHeadModel", "WithLMHead")


NOT_THROUGH_TRANSFORMERS = (
    "its weights are quantized, and models that run through Transformers must be in full "
    "precision. --quantization then quantizes them"
)


class FallbackConfig(ArchitectureConfig, kw_only=True):
    """A config.json that only Transformers understands. Numbers are 0 where it has none."""

    raw: dict[str, Any]
    folder: Path | None = None
    trust_remote_code: bool = False
    vocab_size: int = 0
    hidden_size: int = 0
    intermediate_size: int = 0
    num_hidden_layers: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    max_positions: int = 0
    windows: tuple[int, ...] = ()
    """Sliding window of each layer, in tokens, as far as config.json says; 0: none."""

    @property
    def path(self) -> Path:
        """Path of config.json, for messages."""
        return (self.folder or Path()) / "config.json"

    @property
    def memory(self) -> tuple[TokenMemory, ...]:
        """Memory of the layers as config.json suggests; none if fields are missing."""
        heads = self.num_key_value_heads or self.num_attention_heads
        size = self.head_dim or self.hidden_size // max(1, self.num_attention_heads)
        if not heads or not size:
            return ()
        windows = self.windows or (0,) * self.num_hidden_layers
        return tuple(TokenMemory.of_keys(heads, size, window) for window in windows)


def may_fall_back(raw: Mapping[str, Any]) -> bool:
    """Return True if a config.json names a decoder, by the name of its class."""
    names = raw.get("architectures")
    return isinstance(names, list) and any(str(name).endswith(_ENDS) for name in names)


def fallback_config(raw: dict[str, Any]) -> FallbackConfig:
    """Read the fields that estimates need."""
    text = raw.get("text_config") if isinstance(raw.get("text_config"), dict) else {}
    found = {**raw, **(text or {})}

    dtype = raw.get("dtype") or raw.get("torch_dtype")
    config = FallbackConfig(
        architectures=[str(name) for name in raw.get("architectures") or []],
        model_type=str(raw.get("model_type")),
        dtype=dtype if isinstance(dtype, str) else None,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        raw=raw,
    )
    for field, names in _SYNONYMS.items():
        values = (found.get(name) for name in names)
        setattr(config, field, next((v for v in values if isinstance(v, int) and v > 0), 0))
    kinds, window = found.get("layer_types"), found.get("sliding_window")
    if isinstance(kinds, list) and len(kinds) == config.num_hidden_layers and _is_size(window):
        config.windows = tuple(window * (kind == "sliding_attention") for kind in kinds)
    return config


def _is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and value > 0


def describe_fallback(config: FallbackConfig) -> External:
    """Describe the model as far as config.json says."""
    model = "toolkit.models.fallback.model:TransformersModel"
    return External(model, config.max_positions, config.memory)
