"""Log-probabilities of the model in Transformers, in fp32 on the CPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from toolkit import units
from toolkit.config import EngineConfig, ModelConfig
from toolkit.hardware import memory
from toolkit.models.build import load_config
from toolkit.models.config.model_config import ArchitectureConfig
from toolkit.models.config.overrides import read_config
from toolkit.models.config.registry import describe
from toolkit.models.config.wrapped import text_config
from toolkit.models.describe import Decoder
from toolkit.models.fallback.config import FallbackConfig
from toolkit.pictures.families import find_family
from toolkit.pictures.processor import processor_class
from toolkit.verify.compare import Scored
from toolkit.verify.prompts import Question, picture
from toolkit.weights.formats import QUANTIZATION_FIELDS, Packings
from toolkit.weights.loading.dense import read_dense
from toolkit.weights.names import is_of_tower
from toolkit.worker.startup.towers import read_pictures

SPARE = 1.3
"""Memory over that of the weights, for their conversion and for activations."""


class UnsupportedError(Exception):
    """Transformers cannot run the model here. The message says why."""


@torch.inference_mode()
def score(
    folder: Path,
    config: EngineConfig,
    num_parameters: int,
    sequences: Sequence[Question],
    num_likeliest: int,
) -> list[Scored]:
    """Return what Transformers computes for sequences. Raises UnsupportedError.

    Without the tower, which a quantized checkpoint is read without, those with a picture are left
    out."""
    needed, free = int(4 * num_parameters * SPARE), memory.available(torch.device("cpu"))
    if needed > free:
        raise UnsupportedError(
            f"Transformers needs {units.size(needed)} of memory in float32, and "
            f"{units.size(free)} are free"
        )
    given = config.model
    own = load_config(folder, given)
    sees = own.packings is None and any(one.has_picture for one in sequences)
    model = _load_seeing(folder) if sees else _load(folder, given)
    if given.quantization is not None:
        is_fallback = isinstance(own, FallbackConfig)
        _round_weights(model, given.quantization, with_experts=not is_fallback)
    found = []
    for tokens, has_picture in sequences:
        inputs: dict[str, Any] = {}
        if has_picture:
            if not sees:
                break
            inputs = _picture_inputs(model, folder, own, config, list(tokens))
        found.append(_score(model, list(tokens), num_likeliest, inputs))
    return found


def _score(model: Any, tokens: list[int], num_likeliest: int, inputs: dict[str, Any]) -> Scored:
    logits = model(torch.tensor([tokens]), use_cache=False, **inputs).logits[0, :-1]
    chances = logits.float().log_softmax(-1)
    top, given = chances.topk(num_likeliest), torch.tensor(tokens[1:])[:, None]
    ids = torch.cat((top.indices, given), dim=1).tolist()
    values = torch.cat((top.values, chances.gather(1, given)), dim=1).tolist()
    pairs = zip(ids, values, strict=True)
    return Scored(
        tokens,
        {position: dict(zip(*both, strict=True)) for position, both in enumerate(pairs, 1)},
    )


def _load(folder: Path, given: ModelConfig) -> Any:
    """Load a model that reads text."""

    def load(transformers: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        own = load_config(folder, given)
        config = _config(folder, given, own)
        if own.packings is None and not own.is_wrapped:
            return transformers.AutoModelForCausalLM.from_pretrained(  # type: ignore[no-any-return]
                folder, config=config, **options
            )
        with torch.device("meta"):
            kind = type(transformers.AutoModelForCausalLM.from_config(config))
        weights = _as_read(folder, own)
        return kind.from_pretrained(  # type: ignore[no-any-return]
            None, config=config, state_dict=weights, **options
        )

    return _loaded(load)


def _load_seeing(folder: Path) -> Any:
    """Load a model with its tower."""
    return _loaded(
        lambda transformers, options: transformers.AutoModelForImageTextToText.from_pretrained(
            folder, **options
        )
    )


def _loaded(load: Callable[[Any, dict[str, Any]], tuple[Any, dict[str, Any]]]) -> Any:
    """Load a model of Transformers with all its tensors. Raises UnsupportedError."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    options = {
        "dtype": torch.float32,
        "attn_implementation": "eager",
        "output_loading_info": True,
    }
    try:
        model, report = load(transformers, options)
    except Exception as error:  # Transformers raises many types for what it does not support
        text = " ".join(str(error).split())[:200] or type(error).__name__
        raise UnsupportedError(f"Transformers cannot load it: {text}") from None
    if missing := sorted(report["missing_keys"]):
        raise UnsupportedError(f"Transformers misses tensors of the checkpoint: {missing[0]}")
    return model.eval()


def _picture_inputs(
    model: Any, folder: Path, own: ArchitectureConfig, config: EngineConfig, tokens: list[int]
) -> dict[str, Any]:
    """Return the picture's arguments of the model, from Transformers' own image processor."""
    found = read_pictures(folder, own, config.pictures)
    assert found is not None, "the engine has taken a picture"
    sight, _, settings = found
    processor = processor_class(settings).from_pretrained(
        folder, **(config.pictures.mm_processor_kwargs or {})
    )
    taken = inspect.signature(model.forward).parameters
    arguments = find_family(sight.family).OWN_ARGUMENTS
    inputs = dict(processor(images=[picture()], return_tensors="pt", **arguments))
    is_picture = (torch.tensor([tokens]) == sight.token_id).int()
    inputs |= dict.fromkeys(("mm_token_type_ids", "token_type_ids"), is_picture)
    return {name: value for name, value in inputs.items() if name in taken}


def _config(folder: Path, given: ModelConfig, own: ArchitectureConfig) -> Any:
    from transformers import AutoConfig

    if own.packings is None and not own.is_wrapped and not given.overrides:
        return AutoConfig.from_pretrained(folder)
    raw = text_config(read_config(folder, given.overrides))
    fields = {name: value for name, value in raw.items() if name not in QUANTIZATION_FIELDS}
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def _as_read(folder: Path, own: ArchitectureConfig) -> dict[str, torch.Tensor]:
    """Return the weights as tk reads them, in fp32: of a quantized checkpoint, or next to a tower.

    The comparison is of what the model computes with them."""
    description = describe(own)
    assert isinstance(description, Decoder), "others are not quantized, and have no tower"
    if own.packings is None:
        stored = read_dense(folder, Packings("none", lambda _: None, {}), {})
        return {name: tensor for name, tensor in stored.items() if not is_of_tower(name)}
    shapes = {one.name: one.shape for one in description.parameters() if len(one.shape) > 1}
    return read_dense(folder, own.packings, shapes)


def _round_weights(model: Any, method: str, *, with_experts: bool) -> None:
    """Round the weights of linear layers, with a scale for each row or, for int4, group.

    with_experts: round those of experts, too. Shares no code with the engine's quantization, which
    is checked by it."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if (module is head and method == "fp8") or is_of_tower(f"{name}."):
            continue
        own_method = "int8" if module is head and method == "int4" else method
        if not with_experts and type(module).__name__.endswith("Experts"):
            continue
        for rows in _rows_of(module):
            _round_rows(rows, own_method)


def _rows_of(module: Any) -> Iterator[torch.Tensor]:
    """Yield views [out, in] of a module's weights that are quantized. A tied table is one too."""
    kind = type(module).__name__
    if kind.endswith(("Linear", "Conv1D")):
        weight = module.weight.data
        if len(weight) > 1:  # not the gate of a shared expert
            yield weight.T if kind == "Conv1D" else weight
    elif kind.endswith("Experts"):
        for stack in (module.gate_up_proj.data, module.down_proj.data):
            yield from stack.mT if module.is_transposed else stack


def _round_rows(rows: torch.Tensor, method: str) -> None:
    if method == "int4":
        rows.copy_(_rounded_to_int4(rows))
        return
    greatest = rows.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    if method == "int8":
        scale = greatest / torch.full_like(greatest, 127)
        rows.copy_((rows * (1 / scale)).round() * scale)
    else:
        limit = torch.full_like(greatest, 448)
        values = (rows * (limit / greatest)).to(torch.float8_e4m3fn)
        rows.copy_(values.float() * (greatest / limit))


def _rounded_to_int4(rows: torch.Tensor) -> torch.Tensor:
    """Round groups of columns to 4 bits: the number farthest from zero is the integer -8."""
    size = next((size for size in (128, 64, 32) if rows.shape[1] % size == 0), rows.shape[1])
    groups = rows.reshape(-1, size)
    farthest = groups[torch.arange(len(groups)), groups.abs().argmax(1)]
    scale = (farthest / -8).half().float()[:, None]
    inverse = torch.where(scale == 0, torch.zeros_like(scale), 1 / scale)
    return ((groups * inverse).round().clamp(-8, 7) * scale).view(rows.shape)
