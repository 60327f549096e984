"""What a checkpoint is, from its config.json and the headers of its safetensors files: nothing is loaded."""

from __future__ import annotations

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

RUNS = (
    "GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
    "GPT2Model", "LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model",
    "BertModel", "BertForSequenceClassification", "RobertaModel", "RobertaForSequenceClassification",
    "XLMRobertaModel", "XLMRobertaForSequenceClassification",
)  # fmt: skip
"""The architectures that tk runs: the names of `models.registry.SUPPORTED`, which cannot be imported without torch."""
TYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}
"""Of the types that weights and caches are kept in here."""
TYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "fp8",
    "F8_E5M2": "fp8",
}
"""Safetensors' names for types, and ours."""
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
_NO_WEIGHTS = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")
"""Buffers that old checkpoints carry along."""
_NOT_IN_ENCODERS = ("pooler.", "cls.", "lm_head.", "embeddings.position_ids")
_TABLES = ("wte.", "wpe.", "embed_tokens.", "_embeddings.", "lm_head.")
"""What the names of tensors have that are no linear layer's."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """`type`: float32, ..., as torch calls it, or safetensors' name for what is none of ours."""

    name: str
    type: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)

    @property
    def is_vocabulary(self) -> bool:
        """Whether it is the table of tokens, or the output head."""
        return any(part in self.name for part in ("wte.", "embed_tokens.", "lm_head."))

    @property
    def is_table(self) -> bool:
        """Whether rows of it are looked up, of tokens or of positions."""
        return any(part in self.name for part in ("wte.", "wpe.", "embed_tokens."))

    @property
    def is_linear(self) -> bool:
        """Whether it is the weight of a linear layer, which can be quantized."""
        return len(self.shape) == 2 and not any(part in self.name for part in _TABLES)


@dataclass(frozen=True)
class Checkpoint:
    """A model that lies on this machine, or on the hub."""

    name: str
    raw: dict[str, Any]
    """What config.json says."""
    files: dict[str, int] = field(default_factory=dict)
    """Sizes in bytes, by name."""
    tensors: tuple[Tensor, ...] = ()
    """Of its safetensors files; empty where it has none."""
    folder: Path | None = None
    """None: it is on the hub alone."""
    read: Callable[[str], str] = field(default=lambda name: "", repr=False, compare=False)
    """The text of one of its files; empty when it has none of that name."""

    @property
    def architecture(self) -> str:
        """As config.json names it, else its kind."""
        return str(
            next(iter(self.raw.get("architectures") or []), self.raw.get("model_type", "unknown"))
        )

    @property
    def kind(self) -> str:
        return str(self.raw.get("model_type", "unknown"))

    @property
    def problem(self) -> str | None:
        """Why tk does not run it."""
        quantization = self.raw.get("quantization_config")
        if quantization:
            method = (
                quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            )
            return f"its weights are quantized ({method})"
        if self.architecture not in RUNS:
            return f"tk does not run {self.architecture}"
        try:
            parse_config(self.raw)
        except ValueError as error:
            return str(error)
        return None if self.has_weights else "it has no weights"

    @cached_property
    def config(self) -> Any:
        """As the engine reads it. Raises CheckpointError for what it does not run."""
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
        """Bytes of all its files."""
        return sum(self.files.values())

    @property
    def stored_type(self) -> str | None:
        """The type that most of its numbers are stored in."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors:
            sizes[tensor.type] = sizes.get(tensor.type, 0) + tensor.size
        if sizes:
            return max(sizes, key=lambda kind: sizes[kind])
        said = self.raw.get("dtype") or self.raw.get("torch_dtype")
        return str(said) if said else None

    @property
    def weights(self) -> Iterator[Tensor]:
        """The tensors that the engine loads. Raises CheckpointError where there is no telling."""
        if not self.tensors:
            raise CheckpointError(
                f"{self.name} has no safetensors file, whose header says what its weights take."
            )
        for tensor in self.tensors:
            if tensor.name.endswith(_NO_WEIGHTS):
                continue
            if tensor.name == "lm_head.weight" and getattr(
                self.config, "tie_word_embeddings", False
            ):
                continue
            if self.is_encoder and self._is_left_out(tensor.name):
                continue
            yield tensor

    def _is_left_out(self, name: str) -> bool:
        scores = not self.architecture.endswith("Model")
        return any(part in name for part in _NOT_IN_ENCODERS) and not (
            scores and "pooler.dense" in name
        )

    @property
    def num_parameters(self) -> int | None:
        """None where no header says it."""
        if not self.tensors:
            return None
        return sum(tensor.size for tensor in (self.tensors if self.problem else self.weights))

    @property
    def context(self) -> int | None:
        """The longest sequence that it is run with, in tokens, unless a setting says another."""
        if self.problem is not None:
            said = self.raw.get("max_position_embeddings") or self.raw.get("n_positions")
            return said if isinstance(said, int) else None
        wanted = None
        if self.folder is not None and has_pooling(self.folder):
            wanted = read_pooling(self.folder, None, "mean").max_seq_length
        return min(self.max_positions, wanted or self.max_positions)

    @property
    def max_positions(self) -> int:
        """The longest sequence that it was made for, in tokens."""
        config = self.config
        if isinstance(config, XLMRobertaConfig):
            return int(config.max_position_embeddings - config.pad_token_id - 1)
        return int(config.max_position_embeddings)

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """(layers, key and value heads, size of a head); all 0 for an encoder, which has no cache."""
        config = self.config
        if isinstance(config, GPT2Config):
            heads = config.n_head
            return config.n_layer, heads, config.n_embd // heads
        if isinstance(config, LlamaConfig):
            return config.num_hidden_layers, config.num_key_value_heads or 0, config.head_dim or 0
        return 0, 0, 0


def read_folder(folder: Path, name: str) -> Checkpoint:
    """The checkpoint in a folder. Raises CheckpointError when its files cannot be read, or are not all there."""
    try:
        raw = json.loads((folder / "config.json").read_text())
        if not isinstance(raw, dict):
            raise ValueError("it holds no object")
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
    """The safetensors files that the loader would read. Raises CheckpointError when one is missing."""
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
            f"{folder} lacks {len(absent)} of the {len(listed)} files that {index.name} names: {', '.join(absent[:3])}."
        )
    return listed


def read_header(file: Path) -> list[Tensor]:
    """The tensors of a safetensors file. Raises CheckpointError when it is cut short or is none.

    A file is the length of its header in eight bytes, the header in JSON, and the tensors' bytes
    (https://huggingface.co/docs/safetensors).
    """
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
            f"{file} is no valid safetensors file. Fetch or copy it again."
        ) from None
    if size < end:
        raise CheckpointError(
            f"{file} is cut short: it has {size} bytes of {end}. Fetch or copy it again."
        )
    return tensors
