"""Describe a checkpoint from config.json and its safetensors headers, without loading it."""

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from toolkit.errors import CheckpointError
from toolkit.models.model_config import (
    BertConfig,
    GPT2Config,
    LlamaConfig,
    XLMRobertaConfig,
    parse_config,
)
from toolkit.pooling.settings import has_pooling, read_pooling

ARCHITECTURES = (
    "GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM",
    "Qwen3ForCausalLM", "GPT2Model", "LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model",
    "BertModel", "BertForSequenceClassification", "RobertaModel",
    "RobertaForSequenceClassification", "XLMRobertaModel", "XLMRobertaForSequenceClassification",
)  # fmt: skip
"""Names in `models.registry.SUPPORTED`, which cannot be imported without torch."""
TYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}
TYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "fp8",
    "F8_E5M2": "fp8",
}  # our names for safetensors' types
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
_NO_WEIGHTS = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")
"""Buffers in old checkpoints."""
_NOT_IN_ENCODERS = ("pooler.", "cls.", "lm_head.", "embeddings.position_ids")
_TABLES = ("wte.", "wpe.", "embed_tokens.", "_embeddings.", "lm_head.")
"""Substrings of the names of matrices that are not linear layers."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a checkpoint. `type` is torch's name, or safetensors' for an unsupported one."""

    name: str
    type: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_vocabulary(self) -> bool:
        """True for the token embedding and the output head."""
        return any(part in self.name for part in ("wte.", "embed_tokens.", "lm_head."))

    @property
    def is_table(self) -> bool:
        """True for token and position embeddings."""
        return any(part in self.name for part in ("wte.", "wpe.", "embed_tokens."))

    @property
    def is_linear(self) -> bool:
        """True for the weight of a linear layer, which can be quantized."""
        return len(self.shape) == 2 and not any(part in self.name for part in _TABLES)


@dataclass(frozen=True)
class Checkpoint:
    """A model on this machine or on the hub."""

    name: str
    raw: dict[str, Any]  # content of config.json
    files: dict[str, int] = field(default_factory=dict)  # sizes in bytes, by name
    tensors: tuple[Tensor, ...] = ()  # of its safetensors files
    folder: Path | None = None  # None: only on the hub
    read: Callable[[str], str] = field(default=lambda name: "", repr=False, compare=False)
    """Returns the text of a file, empty if there is none of that name."""

    @property
    def architecture(self) -> str:
        """First of config.json's architectures, else its model_type."""
        return str(
            next(iter(self.raw.get("architectures") or []), self.raw.get("model_type", "unknown"))
        )

    @property
    def kind(self) -> str:
        return str(self.raw.get("model_type", "unknown"))

    @property
    def problem(self) -> str | None:
        """Reason why tk cannot run the model, or None."""
        quantization = self.raw.get("quantization_config")
        if quantization:
            method = (
                quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            )
            return f"its weights are quantized ({method})"
        if self.architecture not in ARCHITECTURES:
            return f"tk does not support {self.architecture}"
        try:
            parse_config(self.raw)
        except ValueError as error:
            return str(error)
        return None if self.has_weights else "it has no weights"

    @cached_property
    def config(self) -> Any:
        """Config as the engine parses it. Raises CheckpointError for an unsupported model."""
        if self.problem is not None:
            raise CheckpointError(f"{self.name}: {self.problem}.")
        config = parse_config(self.raw)
        if not self.has_head:
            config.tie_word_embeddings = True
        return config

    @property
    def has_head(self) -> bool:
        return self.architecture.endswith("HeadModel") or not self.architecture.endswith("Model")

    @property
    def is_encoder(self) -> bool:
        return isinstance(self.config, BertConfig)

    @property
    def has_weights(self) -> bool:
        return any(Path(name).match(kind) for name in self.files for kind in WEIGHT_FILES)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())

    @property
    def stored_type(self) -> str | None:
        """Data type of most of the weights."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors:
            sizes[tensor.type] = sizes.get(tensor.type, 0) + tensor.size
        if sizes:
            return max(sizes, key=lambda kind: sizes[kind])
        dtype = self.raw.get("dtype") or self.raw.get("torch_dtype")
        return str(dtype) if dtype else None

    @property
    def weights(self) -> Iterator[Tensor]:
        """Tensors that the engine loads. Raises CheckpointError without safetensors files."""
        if not self.tensors:
            raise CheckpointError(
                f"{self.name} has no safetensors file, so the size of its weights is unknown."
            )
        for tensor in self.tensors:
            if tensor.name.endswith(_NO_WEIGHTS):
                continue
            if tensor.name == "lm_head.weight" and getattr(
                self.config, "tie_word_embeddings", False
            ):
                continue
            if self.is_encoder and self._is_unused(tensor.name):
                continue
            yield tensor

    def _is_unused(self, name: str) -> bool:
        is_scorer = not self.architecture.endswith("Model")
        return any(part in name for part in _NOT_IN_ENCODERS) and not (
            is_scorer and "pooler.dense" in name
        )

    @property
    def num_parameters(self) -> int | None:
        """Number of parameters, or None without safetensors headers."""
        if not self.tensors:
            return None
        return sum(tensor.size for tensor in (self.tensors if self.problem else self.weights))

    @property
    def context(self) -> int | None:
        """Default for --max-model-len, in tokens."""
        if self.problem is not None:
            length = self.raw.get("max_position_embeddings") or self.raw.get("n_positions")
            return length if isinstance(length, int) else None
        limit = None
        if self.folder is not None and has_pooling(self.folder):
            limit = read_pooling(self.folder, None, "mean").max_seq_length
        return min(self.max_positions, limit or self.max_positions)

    @property
    def max_positions(self) -> int:
        """Longest sequence that the model supports, in tokens."""
        config = self.config
        if isinstance(config, XLMRobertaConfig):
            return int(config.max_position_embeddings - config.pad_token_id - 1)
        return int(config.max_position_embeddings)

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """(layers, KV heads, head size). All 0 for an encoder, which has no KV cache."""
        config = self.config
        if isinstance(config, GPT2Config):
            heads = config.n_head
            return config.n_layer, heads, config.n_embd // heads
        if isinstance(config, LlamaConfig):
            return config.num_hidden_layers, config.num_key_value_heads or 0, config.head_dim or 0
        return 0, 0, 0


def read_folder(folder: Path, name: str) -> Checkpoint:
    """Read the checkpoint in a folder. Raises CheckpointError for missing or unreadable files."""
    try:
        raw = json.loads((folder / "config.json").read_text())
        if not isinstance(raw, dict):
            raise ValueError("it is not a JSON object")
        files = {
            path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()
        }
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / 'config.json'} cannot be read: {error}") from None
    tensors = [
        tensor for file in _weight_files(folder, files) for tensor in read_header(folder / file)
    ]
    return Checkpoint(name, raw, files, tuple(tensors), folder, partial(_read_text, folder))


def _read_text(folder: Path, name: str) -> str:
    try:
        return (folder / name).read_text(errors="replace")
    except OSError:
        return ""


def _weight_files(folder: Path, names: Iterable[str]) -> list[str]:
    """Return the safetensors files that the loader reads. Raises CheckpointError if incomplete."""
    found = [name for name in names if name.endswith(".safetensors")]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return ["model.safetensors"] if "model.safetensors" in found else found
    try:
        listed = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} cannot be read: {error!r}") from None
    absent = [name for name in listed if name not in found]
    if absent:
        raise CheckpointError(
            f"{folder} lacks {len(absent)} of the {len(listed)} files that {index.name} lists: "
            f"{', '.join(absent[:3])}."
        )
    return listed


def read_header(file: Path) -> list[Tensor]:
    """Return the tensors of a safetensors file. Raises CheckpointError if cut short or invalid.

    A file is the length of its header in eight bytes, the header in JSON, and the tensors' bytes
    (https://huggingface.co/docs/safetensors)."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            size = file.stat().st_size
            header = json.loads(stream.read(length)) if length <= size - 8 else {}
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        tensors = [
            Tensor(name, TYPES.get(entry["dtype"], entry["dtype"]), tuple(entry["shape"]))
            for name, entry in entries.items()
        ]
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(
            f"{file} is not a valid safetensors file. Fetch or copy it again."
        ) from None
    if size < end:
        raise CheckpointError(
            f"{file} is cut short: it has {size} bytes of {end}. Fetch or copy it again."
        )
    return tensors
