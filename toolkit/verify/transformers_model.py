"""Log-probabilities of the model in Transformers, in fp32 on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from toolkit import units
from toolkit.config import ModelConfig
from toolkit.hardware import memory
from toolkit.models.build import load_config
from toolkit.models.overrides import read_config
from toolkit.verify.compare import Scored
from toolkit.weights.dense import read_dense
from toolkit.weights.formats import QUANTIZATION_FIELDS, Packings

SPARE = 1.3
"""Memory over that of the weights, for their conversion and for activations."""


class UnsupportedError(Exception):
    """Transformers cannot run the model here. The message says why."""


@torch.inference_mode()
def score(
    folder: Path,
    given: ModelConfig,
    num_parameters: int,
    sequences: Sequence[Sequence[int]],
    num_likeliest: int,
) -> list[Scored]:
    """Return what Transformers computes for sequences. Raises UnsupportedError."""
    needed, free = int(4 * num_parameters * SPARE), memory.available(torch.device("cpu"))
    if needed > free:
        raise UnsupportedError(
            f"Transformers needs {units.size(needed)} of memory in float32, and "
            f"{units.size(free)} are free"
        )
    model = _load(folder, given)
    if given.quantization is not None:
        _round_weights(model, given.quantization)
    return [_score(model, list(tokens), num_likeliest) for tokens in sequences]


def _score(model: Any, tokens: list[int], num_likeliest: int) -> Scored:
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0, :-1]
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
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    packings = load_config(folder, given).packings
    try:
        if packings is not None:
            return _load_dequantized(folder, given, packings)
        config = transformers.AutoConfig.from_pretrained(folder)
        if given.overrides:
            config = type(config).from_dict(read_config(folder, given.overrides))
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
        )
    except UnsupportedError:
        raise
    except Exception as error:  # Transformers raises many types for what it does not support
        text = " ".join(str(error).split())[:200] or type(error).__name__
        raise UnsupportedError(f"Transformers cannot load it: {text}") from None
    if missing := sorted(report["missing_keys"]):
        raise UnsupportedError(f"Transformers misses tensors of the checkpoint: {missing[0]}")
    return model.eval()


def _load_dequantized(folder: Path, given: ModelConfig, packings: Packings) -> Any:
    """Return the model of a quantized checkpoint with the weights that tk reads from it, in fp32.

    The comparison is of what the model computes with them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = read_config(folder, given.overrides)
    fields = {name: value for name, value in raw.items() if name not in QUANTIZATION_FIELDS}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    config.dtype = torch.float32
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    report = model.load_state_dict(read_dense(folder, packings, shapes), strict=False)
    model.tie_weights()
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if missing := sorted(set(report.missing_keys) - tied):
        raise UnsupportedError(f"Transformers misses tensors of the checkpoint: {missing[0]}")
    return model.float().eval()


def _round_weights(model: Any, method: str) -> None:
    """Round the weights of linear layers, with a scale for each row or, for int4, group.

    Shares no code with the engine's quantization, which is checked by it."""
    head = model.get_output_embeddings()
    for module in model.modules():
        kind = type(module).__name__
        if not kind.endswith(("Linear", "Conv1D")) or (module is head and method == "fp8"):
            continue
        weight = module.weight.data
        # In place: a tied table is the same parameter. Conv1D's weight is transposed.
        rows = weight.T if kind == "Conv1D" else weight
        greatest = rows.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        if method == "int8" or (method == "int4" and module is head):
            scale = greatest / torch.full_like(greatest, 127)
            rows.copy_((rows * (1 / scale)).round() * scale)
        elif method == "int4":
            rows.copy_(_rounded_to_int4(rows))
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
