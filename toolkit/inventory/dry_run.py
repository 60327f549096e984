"""`tk serve --dry-run`: whether a model fits, before anything of it is loaded."""

from __future__ import annotations

from typing import Any

from toolkit.config import EngineConfig
from toolkit.hardware.devices import find_device
from toolkit.inventory.console import answer, print_facts, talk
from toolkit.inventory.estimate import Estimate, estimate
from toolkit.inventory.find import look_up
from toolkit.units import count, size


def dry_run(engine: EngineConfig, *, as_json: bool) -> int:
    """Prints what the model takes and what is left for its cache; the exit code of the command: 0 when it fits, else 1.

    Raises ToolkitError for a model that is not there or that tk does not run.
    """
    checkpoint = look_up(engine.model.model, engine.model.revision)
    device = find_device(engine.device.device, engine.parallel.num_devices_here)
    made = estimate(checkpoint, engine, device)
    if as_json:
        answer(as_fields(checkpoint.name, made))
    else:
        print_facts(checkpoint.name, _facts(made))
        talk(made.problem or "It fits.")
    return 0 if made.fits else 1


def as_fields(name: str, made: Estimate) -> dict[str, Any]:
    """Names are those of /server_info where it has them. Sizes in bytes, lengths in tokens."""
    return {
        "model": name,
        "fits": made.fits,
        "problem": made.problem,
        "device": made.device.name,
        "tensor_parallel_size": made.parallel.tensor_parallel_size,
        "pipeline_parallel_size": made.parallel.pipeline_parallel_size,
        "data_parallel_size": made.parallel.data_parallel_size,
        "memory_total_bytes": made.device.total,
        "memory_free_bytes": made.device.free,
        "dtype": made.dtype,
        "num_parameters": made.num_parameters,
        "weight_bytes": made.weights,
        "step_bytes": made.step,
        "block_size": made.block_size,
        "num_blocks": made.num_blocks,
        "cache_bytes": made.cache,
        "token_bytes": made.block_bytes / made.block_size,
        "max_model_len": made.max_model_len,
        "largest_max_model_len": made.largest_context,
        "num_sequences": made.sequences,
    }


def _facts(made: Estimate) -> list[tuple[str, str]]:
    device = made.device
    several = f"each of {made.parallel.num_devices}: " if made.parallel.num_devices > 1 else ""
    facts = [
        ("device", f"{several}{device.name}: {size(device.free)} free of {size(device.total)}"),
        (
            "weights",
            f"{size(made.weights)}: {count(made.num_parameters)} parameters in {made.dtype}",
        ),
        ("a step", f"about {size(made.step)}: activations, logits, and the process itself"),
    ]
    if not made.weights_fit:
        return facts
    if not made.has_cache:
        return [*facts, ("context", f"{made.max_model_len:,} tokens; an encoder has no KV cache")]
    per_token = f"{size(made.block_bytes / made.block_size)} each"
    facts += [("KV cache", f"{size(made.cache)}: {made.num_tokens:,} tokens, {per_token}")]
    sequences = f": {made.sequences:.1f} sequences of that length" if made.fits else ""
    return [
        *facts,
        ("context", f"{made.max_model_len:,} tokens{sequences}"),
        (
            "largest",
            f"{made.largest_context:,} tokens (--max-model-len); the model was made for {made.max_positions:,}",
        ),
    ]
