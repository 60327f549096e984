"""Describe a checkpoint from config.json and its safetensors headers, without loading it."""

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from toolkit.ctranslate2 import whisper
from toolkit.ctranslate2.file import MODEL_FILE, is_ctranslate2
from toolkit.errors import CheckpointError, PluginError
from toolkit.files import parse_json, read_json, read_text
from toolkit.gguf.config import named_tensors
from toolkit.gguf.file import GGUF, read_gguf
from toolkit.gguf.folder import MADE_FILES, is_gguf, made_file
from toolkit.models.config.model_config import ArchitectureConfig
from toolkit.models.config.overrides import override, read_config
from toolkit.models.config.registry import describe, find_problem, parse_config
from toolkit.models.config.sounds import Sound
from toolkit.models.config.towers import Sight
from toolkit.models.config.wrapped import text_config
from toolkit.models.describe import Decoder, Encoder, External, Parameter
from toolkit.models.fallback.config import NOT_THROUGH_TRANSFORMERS, FallbackConfig
from toolkit.pictures.settings import FILES
from toolkit.pooling.settings import has_pooling, read_pooling
from toolkit.weights.formats import Packings, read_packings
from toolkit.weights.gguf import packing as gguf
from toolkit.weights.names import is_of_tower, text_name

TYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}
TYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "fp8",
    "F8_E5M2": "fp8",
}  # our names for safetensors' types
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin", "*.gguf", MODEL_FILE)
_NOT_IN_ENCODERS = ("pooler.", "cls.", "lm_head.", "embeddings.position_ids")
_ENCODER_TABLES = "_embeddings."


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a checkpoint.

    `type` is torch's name, or the file format's for one that PyTorch lacks."""

    name: str
    type: str
    shape: tuple[int, ...]
    num_bytes: int | None = None  # None: unknown

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def kind(self) -> str:
        """Type, as safetensors names it."""
        return next((kind for kind, name in TYPES.items() if name == self.type), self.type)


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
    mixture: str | None = None  # of a GGUF file's types, such as Q4_K_M

    def with_overrides(self, overrides: Mapping[str, Any]) -> "Checkpoint":
        """Return the checkpoint with some fields of config.json replaced."""
        return replace(self, raw=override(self.raw, overrides))

    @property
    def architecture(self) -> str:
        """First of config.json's architectures, else its model_type."""
        names = self.raw.get("architectures")
        kind = self.raw.get("model_type", "unknown")
        return str(names[0] if isinstance(names, list) and names else kind)

    @property
    def kind(self) -> str:
        return str(self.raw.get("model_type", "unknown"))

    @property
    def problem(self) -> str | None:
        """Reason why tk cannot run the model, or None."""
        try:
            if find_problem(self.raw):
                return f"tk does not support {self.architecture}"
            config = parse_config(self.raw)
            describe(config)
            if self.packings is not None and isinstance(config, FallbackConfig):
                return NOT_THROUGH_TRANSFORMERS
        except ValueError as error:
            return str(error)
        except (CheckpointError, PluginError) as error:
            return error.message
        return None if self.has_weights else "it has no weights"

    @cached_property
    def packings(self) -> Packings | None:
        """Packings of quantized weights, None without. Raises ValueError for an unknown format."""
        header = {text_name(tensor.name): tensor for tensor in self.tensors}
        return read_packings(text_config(self.raw), header) or gguf.packings(header)

    @cached_property
    def config(self) -> Any:
        """Config as the engine parses it. Raises CheckpointError for an unsupported model."""
        if self.problem is not None:
            raise CheckpointError(f"{self.name}: {self.problem.rstrip('.')}.")
        return parse_config(self.raw)

    @cached_property
    def description(self) -> Decoder | Encoder | External:
        """Description of the model. Raises CheckpointError for an unsupported model."""
        return describe(self.config)

    @property
    def has_weights(self) -> bool:
        return any(Path(name).match(kind) for name in self.files for kind in WEIGHT_FILES)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())

    @property
    def type_bytes(self) -> dict[str, int]:
        """Bytes of the tensors by type, the largest first; empty if one's size is unknown."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors:
            if tensor.num_bytes is None:
                return {}
            sizes[tensor.type] = sizes.get(tensor.type, 0) + tensor.num_bytes
        return dict(sorted(sizes.items(), key=lambda item: -item[1]))

    @property
    def bits_per_weight(self) -> float | None:
        """Stored bits for each parameter; None if unknown."""
        count = self.num_parameters
        return 8 * sum(self.type_bytes.values()) / count if count and self.type_bytes else None

    @property
    def stored_type(self) -> str | None:
        """Data type of most of the weights, or the mixture of types of a GGUF file."""
        if self.mixture is not None:
            return TYPES.get(self.mixture, self.mixture)
        sizes: dict[str, int] = {}
        for tensor in self.tensors:
            sizes[tensor.type] = sizes.get(tensor.type, 0) + tensor.size
        if sizes:
            return max(sizes, key=lambda kind: sizes[kind])
        dtype = self.raw.get("dtype") or self.raw.get("torch_dtype")
        return str(dtype) if dtype else None

    @property
    def parameters(self) -> Iterator[Parameter]:
        """Tensors that the engine loads.

        Raises CheckpointError if they are not described and there are no safetensors files."""
        if isinstance(self.description, Decoder):
            yield from self.description.parameters()
            return
        if not self.tensors:
            raise CheckpointError(
                f"{self.name} has no safetensors file, so the size of its weights is unknown."
            )
        if isinstance(self.description, External):
            for tensor in self.tensors:
                is_linear = len(tensor.shape) > 1 and _ENCODER_TABLES not in tensor.name
                yield Parameter(tensor.name, tensor.shape, "linear" if is_linear else "vector")
            return
        unused = _NOT_IN_ENCODERS
        for tensor in self.tensors:
            is_head = self.description.is_scorer and "pooler.dense" in tensor.name
            if is_head or not any(part in tensor.name for part in unused):
                is_linear = len(tensor.shape) == 2 and _ENCODER_TABLES not in tensor.name
                yield Parameter(tensor.name, tensor.shape, "linear" if is_linear else "vector")

    @property
    def sees(self) -> bool:
        """True if tk runs its tower for pictures, unless --limit-mm-per-prompt is 0."""
        return self.sight is not None and any(file in self.files for file in FILES)

    @property
    def hears(self) -> bool:
        """True if each prompt has a clip. Raises CheckpointError for an unsupported model."""
        described = self.description
        return isinstance(described, Decoder) and described.encoder is not None

    @cached_property
    def sight(self) -> Sight | None:
        """The model's tower for pictures, if tk has its architecture."""
        return None if self._parsed is None else self._parsed.sight

    @cached_property
    def sound(self) -> Sound | None:
        """The model's tower for clips that are tokens, if tk has its architecture."""
        return None if self._parsed is None else self._parsed.sound

    @cached_property
    def _parsed(self) -> ArchitectureConfig | None:
        """Config.json; None if it cannot be used: `problem` says why."""
        try:
            return parse_config(self.raw)
        except (ValueError, CheckpointError, PluginError):
            return None

    @property
    def tower_parameters(self) -> int:
        """Number of parameters of its tower, if tk runs it."""
        if self.sight is None or not self.sees:
            return 0
        unused = self.sight.tower.unused
        return sum(
            tensor.size
            for tensor in self.tensors
            if is_of_tower(tensor.name)
            and not any(part in text_name(tensor.name) for part in unused)
        )

    @property
    def num_parameters(self) -> int | None:
        """Number of parameters, or None if it is unknown."""
        if self.problem is None and (self.tensors or isinstance(self.description, Decoder)):
            return sum(parameter.size for parameter in self.parameters) + self.tower_parameters
        return sum(tensor.size for tensor in self.tensors) or None

    @property
    def num_active(self) -> int | None:
        """Number of parameters that compute one token, if it has experts; else None."""
        count, described = self.num_parameters, self.description
        if count is None or not isinstance(described, Decoder) or not described.has_experts:
            return None
        return count - sum(mix.idle(described.hidden_size) for mix in described.mixes)

    @property
    def context(self) -> int | None:
        """Default for --max-model-len, in tokens."""
        if self.problem is not None:
            length = self.raw.get("max_position_embeddings") or self.raw.get("n_positions")
            return length if isinstance(length, int) else None
        if not self.max_positions:
            return None
        limit = None
        if self.folder is not None and has_pooling(self.folder):
            limit = read_pooling(self.folder, None, "mean").max_seq_length
        return min(self.max_positions, limit or self.max_positions)

    @property
    def max_positions(self) -> int:
        """Context length of the model, in tokens. 0: config.json does not say."""
        return self.description.max_positions

    @property
    def longest(self) -> int:
        """Maximum of --max-model-len, in tokens. 0: config.json does not say."""
        return self.description.longest

    @property
    def implementation(self) -> str:
        """Code that computes the model, as in --model-impl."""
        return "transformers" if isinstance(self.config, FallbackConfig) else "toolkit"


def read_folder(folder: Path, name: str) -> Checkpoint:
    """Read the checkpoint in a folder, or in a GGUF file.

    Raises CheckpointError for missing or unreadable files."""
    if is_gguf(folder):
        model = read_gguf(folder)
        files = {file.name: file.stat().st_size for file in model.files}
        return gguf_checkpoint(model, name, files, folder)
    raw = read_config(folder)
    try:
        files = {
            path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()
        }
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from None
    tensors = (
        _ctranslate2_tensors(folder)
        if is_ctranslate2(folder)
        else [one for file in _weight_files(folder, files) for one in read_header(folder / file)]
    )
    return Checkpoint(name, raw, files, tuple(tensors), folder, partial(_read_text, folder))


def _ctranslate2_tensors(folder: Path) -> list[Tensor]:
    return [
        Tensor(one.name, TYPES.get(one.kind, one.kind), one.shape, one.num_bytes)
        for one in whisper.named_tensors(whisper.read_whisper(folder))
    ]


def gguf_checkpoint(
    model: GGUF, name: str, files: dict[str, int], folder: Path | None
) -> Checkpoint:
    """Describe a GGUF model. Raises CheckpointError if its metadata cannot be used."""
    tensors = tuple(
        Tensor(one.name, TYPES.get(one.kind.name, one.kind.name), one.shape, one.num_bytes)
        for one in named_tensors(model)
    )
    raw = json.loads(made_file(model, "config.json"))
    # Headers of a file on the hub are not kept.
    texts = {file: made_file(model, file) for file in MADE_FILES} if folder is None else None

    def read(file: str) -> str:
        if texts is not None:
            return texts.get(file, "")
        return made_file(model, file) if file in MADE_FILES else ""

    return Checkpoint(name, raw, files, tensors, folder, read, model.mixture)


def _read_text(folder: Path, name: str) -> str:
    try:
        return read_text(folder / name, errors="replace")
    except OSError:
        return ""


def _weight_files(folder: Path, names: Iterable[str]) -> list[str]:
    """Return the safetensors files that the loader reads. Raises CheckpointError if incomplete."""
    found = [name for name in names if name.endswith(".safetensors")]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return ["model.safetensors"] if "model.safetensors" in found else found
    try:
        listed = sorted(set(read_json(index)["weight_map"].values()))
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
            header = parse_json(stream.read(length)) if length <= size - 8 else {}
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        tensors = [
            Tensor(
                name,
                TYPES.get(entry["dtype"], entry["dtype"]),
                tuple(entry["shape"]),
                entry["data_offsets"][1] - entry["data_offsets"][0],
            )
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
