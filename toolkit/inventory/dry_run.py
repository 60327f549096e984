"""`tk serve --dry-run`: estimate whether a model fits, without loading it."""

from pathlib import Path
from typing import Any

import msgspec

from toolkit import hub
from toolkit.config import EngineConfig, PluginConfig
from toolkit.errors import errors_about
from toolkit.hardware.devices import find_device
from toolkit.inventory.checkpoint import Checkpoint
from toolkit.inventory.console import print_facts, print_json, print_note
from toolkit.inventory.drafters import drafter_of, find_drafter
from toolkit.inventory.estimate import Estimate, estimate
from toolkit.inventory.find import find_checkpoint
from toolkit.lora.files import require_lora_dir
from toolkit.models.describe import External
from toolkit.units import count, size


def dry_run(engine: EngineConfig, *, as_json: bool) -> int:
    """Print the memory that a model needs. Return the exit code: 0 if it fits, else 1.

    Raises ToolkitError for a model that is missing or unsupported, and for settings that a start
    refuses."""
    found = find_checkpoint(engine.model.model, engine.model.revision)
    checkpoint = found.with_overrides(engine.model.overrides)
    device = find_device(engine.device.device, engine.parallel.num_local_devices)
    _check_settings(found, engine, falls_back=_falls_back(checkpoint, engine))
    result = estimate(checkpoint, engine, device, drafter_of(checkpoint, engine))
    if as_json:
        print_json(as_fields(checkpoint.name, result))
    else:
        print_facts(checkpoint.name, _facts(result))
        print_note(result.problem or "It fits.")
    return 0 if result.fits else 1


def _falls_back(checkpoint: Checkpoint, engine: EngineConfig) -> bool:
    """Return True if the model would run through Transformers."""
    if engine.model.model_impl != "auto":
        return engine.model.model_impl == "transformers"
    return checkpoint.problem is None and isinstance(checkpoint.description, External)


def _check_settings(found: Checkpoint, engine: EngineConfig, *, falls_back: bool) -> None:
    """Raise ToolkitError for settings, and models of Transformers, that a start refuses.

    Models on the hub are checked by their config.json, GGUF files and adapters there not at all."""
    wanted = engine.speculation.drafter
    if engine.model.tokenizer is not None and hub.local_tokenizer(engine.model.tokenizer) is None:
        hub.require_on_hub(engine.model.tokenizer)
    is_plain = (
        engine.parallel.world_size == 1
        and not engine.parallel.enable_expert_parallel
        and engine.model.quantization is None
        and engine.model.pooling is None
        and engine.device.attention_backend == "auto"
        and engine.cache.kv_cache_dtype == "auto"
        and not engine.lora.is_enabled
        and not falls_back
        and engine.plugins == PluginConfig()
        and wanted is None
    )
    require_lora_dir(engine.lora.lora_dir)
    if is_plain:
        return  # without importing torch
    settings = {
        "lora_modules": _local_adapters(engine),
        "enable_lora": engine.lora.is_enabled,
        "allow_runtime_lora": False,  # it needs adapters, and those may be on the hub
    }
    folder = found.folder or _described(engine.model.model, engine.model.revision)
    has_weights = found.folder is not None
    if wanted is not None and wanted.model is not None:
        drafter = find_drafter(wanted.model, wanted.revision)
        drafter_folder = drafter.folder or _described(wanted.model, wanted.revision)
        if drafter_folder is None:
            return
        has_weights = has_weights and drafter.folder is not None
        given = dict(engine.speculation.speculative_config or {})
        settings["speculative_config"] = given | {"model": str(drafter_folder.absolute())}
    if not has_weights:
        settings["load_format"] = "dummy"
    if folder is not None:
        from toolkit.executor.checks import check_settings

        check_settings(engine.with_settings(**settings), folder)


def _described(name: str | None, revision: str | None) -> Path | None:
    """Return the folder of a hub model's config.json, which is in the cache. None: it has none."""
    assert name is not None, "the demo model is on this machine"
    folder = hub.cached_snapshot(name, revision, with_weights=False)
    return folder if folder is not None and (folder / "config.json").is_file() else None


def _local_adapters(engine: EngineConfig) -> tuple[str, ...]:
    """Return the --lora-modules that are on this machine, with their folders.

    Raises ModelNotFoundError for one that cannot be downloaded either."""
    modules = []
    for name, path in engine.lora.adapters.items():
        folder = hub.local_adapter(path)
        if folder is None:
            with errors_about(f"adapter {name!r}"):
                hub.require_on_hub(path)
        else:
            module = {"name": name, "path": str(folder.absolute())}
            modules.append(msgspec.json.encode(module).decode())
    return tuple(modules)


def as_fields(name: str, result: Estimate) -> dict[str, Any]:
    """Return the fields for --json, named as in /server_info: sizes in bytes, lengths in tokens."""
    return {
        "model": name,
        "fits": result.fits,
        "problem": result.problem,
        "device": result.device.name,
        "tensor_parallel_size": result.parallel.tensor_parallel_size,
        "pipeline_parallel_size": result.parallel.pipeline_parallel_size,
        "data_parallel_size": result.parallel.data_parallel_size,
        "memory_total_bytes": result.device.total,
        "memory_free_bytes": result.device.free,
        "dtype": result.dtype,
        "num_parameters": result.num_parameters,
        "weight_bytes": result.weights,
        "expanded_weight_bytes": result.expanded,
        "drafter_weight_bytes": result.drafter,
        "tower_weight_bytes": result.tower,
        "picture_cache_bytes": result.pictures,
        "step_bytes": result.step,
        "block_size": result.block_size,
        "num_blocks": result.num_blocks,
        "state_bytes": result.states[2],
        "num_state_snapshots": result.states[1],
        "cache_bytes": result.cache,
        "groups": [
            {
                "window": group.window,
                "chunk": group.chunk,
                "feature": group.feature,
                "page_tokens": group.blocks_per_page * result.block_size,
                "padding": result.layout.padding(g),
            }
            for g, group in enumerate(result.layout.groups)
        ],
        "page_bytes": result.block_bytes,
        "sequence_bytes": result.sequence_bytes[0],
        "sequence_peak_bytes": result.sequence_bytes[1],
        "token_bytes": result.cache / result.num_tokens if result.num_tokens else 0.0,
        "max_model_len": result.max_model_len,
        "largest_max_model_len": result.largest_context,
        "num_sequences": result.num_sequences,
    }


def _facts(result: Estimate) -> list[tuple[str, str]]:
    device, num_devices = result.device, result.parallel.num_devices
    each = f"each of {num_devices}: " if num_devices > 1 else ""
    graphs = ", CUDA graphs" if device.kind == "cuda" else ""
    facts = [
        ("device", f"{each}{device.name}: {size(device.free)} free of {size(device.total)}"),
        (
            "weights",
            f"{size(result.weights)}: {count(result.num_parameters)} parameters in "
            f"{result.weight_type}",
        ),
        ("step", f"about {size(result.step)}: activations, logits{graphs}, and the process itself"),
    ]
    if result.expanded:
        facts.insert(2, ("in 16 bits", f"{size(result.expanded)} of weights, for large steps, too"))
    if result.drafter:
        facts.insert(2, ("drafter", f"{size(result.drafter)} of the weights"))
    if result.tower:
        text = f"{size(result.tower)} of the weights; {size(result.pictures)} for pictures"
        facts.insert(2, ("tower", f"{text} (--mm-cache-gib)"))
    elif result.pictures:
        facts.insert(2, ("tower", f"{size(result.pictures)} for clips (--mm-cache-gib)"))
    if not result.weights_fit or (result.has_cache and not result.num_blocks):
        return facts
    if not result.has_cache:
        return [*facts, ("context", f"{result.max_model_len:,} tokens; an encoder has no KV cache")]
    per_token = f"{size(result.cache / result.num_tokens)} each"
    about = "about " if result.is_approximate else ""
    groups = result.layout.groups
    differs = any(group.frees or group.feature for group in groups)
    length = f" in sequences of {result.max_model_len:,}" if differs else ""
    text = f"{about}{size(result.cache)}: {about}{result.num_tokens:,} tokens, {per_token}{length}"
    facts += [("KV cache", text)]
    requests, snapshots, state_bytes = result.states
    if state_bytes:
        text = f"{size(state_bytes)} each: {requests} of requests (--max-num-seqs), {snapshots}"
        facts += [("states", f"{text} after prompts (--state-cache-gib)")]
    name = "clips" if any(group.feature for group in groups) else "windows"
    windows = [(name, _groups(result))] if differs else []
    sequences = f": {result.num_sequences:.1f} sequences of that length" if result.fits else ""
    return [
        *facts,
        *windows,
        ("context", f"{result.max_model_len:,} tokens{sequences}"),
        (
            "largest",
            f"{result.largest_context:,} tokens (--max-model-len); the model supports "
            f"{result.max_positions:,}",
        ),
    ]


def _groups(result: Estimate) -> str:
    """Return what each group of layers keeps, and what a sequence takes, in lines."""
    layout = result.layout
    lines = []
    for g, group in enumerate(layout.groups):
        num_layers = sum(layout.group_of(one) == g for one in layout.of_tokens)
        padding = layout.padding(g)
        unused = f", {padding:.1%} of them unused" if padding >= 0.0005 else ""
        pages = f"pages of {group.blocks_per_page * result.block_size} tokens{unused}"
        lines.append(f"{group.kept_by(num_layers)}, in {pages}")
    decode, most = map(size, result.sequence_bytes)
    clip = " and their clip" if any(group.feature for group in layout.groups) else ""
    lines += [
        f"{result.max_model_len:,} tokens{clip} take {decode}; while a prompt is computed, up to "
        f"{most} (--max-num-batched-tokens)"
    ]
    return "\n".join(lines)
