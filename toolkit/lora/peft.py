"""Read LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from toolkit.config.engine import LoRAConfig
from toolkit.errors import CheckpointError
from toolkit.lora.files import CONFIG, LEAST_MAX_RANK, TENSORS, read_file
from toolkit.weights.loading.safetensors import parse_header, read_header
from toolkit.weights.names import is_of_tower, text_name

if TYPE_CHECKING:
    from pydantic_core import SchemaValidator

PREFIX = "base_model.model."
LOW, UP = ".lora_A.weight", ".lora_B.weight"
TABLE_LOW, TABLE_UP = ".lora_embedding_A", ".lora_embedding_B"
ENDS = (TABLE_LOW, "lm_head" + LOW, "embed_out" + LOW)  # factors of embeddings and output head
TABLE = ".base_layer.weight"  # the base model's, which PEFT saves next to an embedding's factors
MAX_CONFIG, MAX_TENSORS = 1 << 20, 16 << 30  # bytes of an adapter's files
FACTORS = (torch.float32, torch.float16, torch.bfloat16)
"""Types that are read as they are; others become fp32."""

Fail = Callable[[str], CheckpointError]


class PeftConfig(msgspec.Struct, kw_only=True):
    """Fields of adapter_config.json that decide what the adapter computes."""

    peft_type: str = ""
    r: int = 8
    lora_alpha: float = 8
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    use_rslora: bool = False
    use_dora: bool = False
    use_qalora: bool = False
    bias: str = "none"
    lora_bias: bool = False
    modules_to_save: list[str] | None = None
    layer_replication: Any = None
    trainable_token_indices: Any = None
    target_parameters: list[str] | None = None
    target_modules: list[str] | str | None = None
    exclude_modules: Any = None
    layers_to_transform: Any = None

    @property
    def problem(self) -> str | None:
        """Return why the adapter is not supported, or None."""
        if self.peft_type != "LORA":
            return f"its peft_type is {self.peft_type!r}, and tk reads LORA"
        if (lowest := min((self.r, *self.rank_pattern.values()))) < 1:
            return f"its rank is {lowest}"
        if self.use_dora:
            return "it is a DoRA adapter (use_dora), which tk does not support"
        if self.bias != "none" or self.lora_bias:
            return "it changes biases, which tk does not support. Train it with bias='none'"
        if self.modules_to_save:
            listed = ", ".join(self.modules_to_save)
            return f"it replaces modules of the base model (modules_to_save: {listed})"
        for name in ("use_qalora", "layer_replication", "trainable_token_indices"):
            if getattr(self, name):
                return f"it has {name}, which tk does not support"
        if self.target_parameters:
            listed = ", ".join(self.target_parameters)
            return (
                f"it changes parameters, as of experts (target_parameters: {listed}), and tk "
                f"supports only linear layers"
            )
        return None

    @property
    def highest_rank(self) -> int:
        return max(self.r, *self.rank_pattern.values()) if self.rank_pattern else self.r

    def must_change(self, module: str) -> bool:
        """Return True if the adapter must have factors of this projection."""
        targets = self.target_modules
        if not isinstance(targets, list) or self.exclude_modules or self.layers_to_transform:
            return False
        return any(f".{module}".endswith(f".{target}") for target in targets)

    def rank(self, module: str) -> int:
        return int(_find(self.rank_pattern, module, self.r))

    def scale(self, module: str) -> float:
        """Return the factor of an adapter's product (rsLoRA: arXiv:2312.03732)."""
        rank = self.rank(module)
        alpha = _find(self.alpha_pattern, module, self.lora_alpha)
        return float(alpha / rank**0.5 if self.use_rslora else alpha / rank)


def _find(patterns: Mapping[str, float], module: str, default: float) -> float:
    """Return the value of the first pattern that matches the end of a module's name."""
    matches = (key for key in patterns if _matcher(key).isinstance_python(module))
    return patterns[key] if (key := next(matches, None)) is not None else default


@lru_cache
def _matcher(pattern: str) -> SchemaValidator:
    """Return a validator of modules' names. Raises SchemaError.

    Rust's regular expressions take linear time. Python's may take forever, and stop all threads."""
    from pydantic_core import SchemaValidator, core_schema

    end = rf"^(?:.*\.)?(?:{pattern})$"
    return SchemaValidator(core_schema.str_schema(pattern=end, regex_engine="rust-regex"))


@dataclass(frozen=True, slots=True)
class Pair:
    """The factors of one projection: x lowᵀ upᵀ * scale is added to its product.

    Those of an embedding are the same, with one-hot rows x: columns are tokens."""

    low: torch.Tensor  # [rank, columns]
    up: torch.Tensor  # [rows, rank]
    scale: float = 1.0


def read_config(name: str, folder: Path) -> PeftConfig:
    """Return an adapter's settings.

    Raises CheckpointError for a file that is missing, broken or unsupported."""
    fail = _failure(name, folder)
    try:
        config = msgspec.json.decode(read_file(folder / CONFIG, MAX_CONFIG), type=PeftConfig)
    except OSError as error:
        raise fail(f"{CONFIG} cannot be read: {error.strerror or error}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise fail(f"{CONFIG} cannot be read: {error}") from None
    if config.problem is not None:
        raise fail(config.problem)
    _check_patterns([*config.rank_pattern, *config.alpha_pattern], fail)
    for field in ("target_modules", "exclude_modules"):
        _check_expression(field, getattr(config, field), fail)
    return config


def _check_expression(field: str, value: object, fail: Fail) -> None:
    """Check a regular expression of PEFT's, which may look ahead, unlike Rust's."""
    if isinstance(value, str):
        try:
            re.compile(value)
        except (re.error, OverflowError, RecursionError) as error:
            raise fail(f"{field} {value!r} is not a regular expression: {error}") from None


def _check_patterns(patterns: list[str], fail: Fail) -> None:
    if not patterns:
        return
    from pydantic_core import SchemaError

    for pattern in patterns:
        try:
            _matcher(pattern)
        except SchemaError as error:
            raise fail(f"the pattern {pattern!r} is not supported: {error}") from None


def read_adapter(
    name: str, folder: Path, max_rank: int, dtype: torch.dtype = torch.float32
) -> dict[str, Pair]:
    """Return an adapter's factors by the names of the base model's projections and embeddings.

    They have the types of the file, and share the memory of its content; dtype: in which they will
    be multiplied. Raises CheckpointError for a file that is missing, broken or unsupported."""
    config, fail = read_config(name, folder), _failure(name, folder)
    if (rank := config.highest_rank) > max_rank:
        raise fail(f"its rank is {rank}. Start with --max-lora-rank {rank} (it is {max_rank})")
    tensors = _read_tensors(folder / TENSORS, fail)
    pairs = {}
    modules = {_module(tensor, fail) for tensor in tensors if not tensor.endswith(TABLE)}
    for module in sorted(modules):
        ends = (LOW, UP) if f"{PREFIX}{module}{LOW}" in tensors else (TABLE_LOW, TABLE_UP)
        ends = (LOW, UP) if f"{PREFIX}{module}{UP}" in tensors else ends
        low, up = (_factors(tensors.get(f"{PREFIX}{module}{end}")) for end in ends)
        if low is None or up is None:
            raise fail(f"{module} has one of lora_A and lora_B only")
        rank = config.rank(module)
        if low.dim() != 2 or up.dim() != 2 or not rank == low.shape[0] == up.shape[1]:
            raise fail(
                f"the rank of {module} is {rank}, but lora_A is {list(low.shape)} and lora_B "
                f"{list(up.shape)}"
            )
        scale = config.scale(module)
        if not (_is_finite(low, 1.0, dtype) and _is_finite(up, scale, dtype)):
            kind = str(dtype).removeprefix("torch.")
            raise fail(f"{module} has numbers that are not finite, or too large for {kind}")
        pairs[text_name(module)] = Pair(low, up, scale)
    if not pairs:
        raise fail(f"{TENSORS} is empty")
    return pairs


class SlotSize(NamedTuple):
    """Room of each slot for an adapter on a GPU."""

    rank: int  # the highest
    ends: bool  # embeddings and output head, too


def slot_size(folders: Mapping[str, Path], config: LoRAConfig) -> SlotSize:
    """Return the size of slots that is given, or that these adapters need, which are folders by
    name.

    Raises CheckpointError for files that are missing, broken or unsupported."""
    ranks, ends = [LEAST_MAX_RANK], False
    for name, folder in folders.items():
        ranks.append(read_config(name, folder).highest_rank)
        with _explained(folder, _failure(name, folder)):
            ends |= any(one.name.endswith(ENDS) for one in read_header(folder / TENSORS))
    given = config.lora_embeddings
    return SlotSize(config.max_lora_rank or max(ranks), ends if given is None else given)


def _failure(name: str, folder: Path) -> Fail:
    return lambda why: CheckpointError(f"adapter {name!r} ({folder}): {why}.")


def _read_tensors(path: Path, fail: Fail) -> dict[str, torch.Tensor]:
    with _explained(path.parent, fail):
        # Not mapped: who trains an adapter again may overwrite the file at any time.
        content = read_file(path, MAX_TENSORS)
        return {one.name: one.view(content) for one in parse_header(Path(TENSORS), content)}


@contextmanager
def _explained(folder: Path, fail: Fail) -> Iterator[None]:
    """Raise errors of the file of tensors as errors of the adapter."""
    try:
        yield
    except CheckpointError as error:
        raise fail(error.message.replace(f"{folder}/", "").rstrip(".")) from None
    except OSError as error:
        raise fail(f"{TENSORS} cannot be read: {error.strerror or error}") from None


def _factors(found: torch.Tensor | None) -> torch.Tensor | None:
    """Return factors as floating-point numbers of 16 or 32 bits."""
    return found if found is None or found.dtype in FACTORS else found.float()


def _is_finite(factors: torch.Tensor, scale: float, dtype: torch.dtype) -> bool:
    """Return True if all factors, multiplied by scale in fp32, are numbers of this type."""
    if not factors.numel():
        return True
    # A twentieth of the time of isfinite().all(). NaN is both the least and the greatest.
    ends = torch.stack(factors.aminmax()).float() * scale
    return bool(ends.to(dtype).isfinite().all())


def _module(tensor: str, fail: Fail) -> str:
    """Return the name of the projection that a tensor belongs to."""
    ends = (LOW, UP, TABLE_LOW, TABLE_UP)
    end = next((end for end in ends if tensor.endswith(end)), None)
    if end is None or not tensor.startswith(PREFIX):
        raise fail(
            f"tk does not know the tensor {tensor}: adapters of linear layers and embeddings are "
            f"supported"
        )
    module = tensor.removeprefix(PREFIX).removesuffix(end)
    if is_of_tower(module):
        raise fail(f"it changes the model's tower for pictures ({module}), which tk does not run")
    return module
