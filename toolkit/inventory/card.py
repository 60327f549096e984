"""`tk show`: describe a model."""

import re
from collections import Counter
from importlib import import_module
from typing import Any

from toolkit.cache_group import CacheGroup
from toolkit.config import EngineConfig
from toolkit.errors import ToolkitError
from toolkit.files import parse_json, read_text
from toolkit.hardware.devices import find_device
from toolkit.inventory.checkpoint import Checkpoint
from toolkit.inventory.console import print_facts, print_json, print_lines
from toolkit.inventory.estimate import Estimate, estimate
from toolkit.inventory.find import find_checkpoint
from toolkit.inventory.layers import lines_of
from toolkit.models.audio import SAMPLE_RATE
from toolkit.models.config.wrapped import decoder_of, text_config
from toolkit.models.memory import TokenMemory
from toolkit.pictures.settings import FILES
from toolkit.units import count, size
from toolkit.weights.layout import on_device

MAX_FILES = 8  # listed, the largest first


def show(model: str | None, revision: str | None, *, layers: bool = False, as_json: bool) -> None:
    """Print a model's description. Raises as `find.find_checkpoint` does.

    layers: that of its layers, which JSON has in addition."""
    checkpoint = find_checkpoint(model, revision)
    if as_json:
        print_json(describe(checkpoint) | ({"layers": lines_of(checkpoint)} if layers else {}))
    elif layers:
        print_lines(lines_of(checkpoint))
    else:
        print_facts(checkpoint.name, _facts(checkpoint))


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the description for --json: sizes in bytes, lengths in tokens, None if unknown."""
    template, problem = chat_template(checkpoint), checkpoint.problem
    packings = None if problem else checkpoint.packings
    return {
        "name": checkpoint.name,
        "path": str(checkpoint.folder) if checkpoint.folder else None,
        "architecture": checkpoint.architecture,
        "problem": checkpoint.problem,
        "implementation": None if checkpoint.problem else checkpoint.implementation,
        "parameters": checkpoint.num_parameters,
        "active_parameters": None if problem else checkpoint.num_active,
        "dtype": checkpoint.stored_type,
        "quantization": None if problem or not packings else packings.method,
        "bits_per_weight": checkpoint.bits_per_weight,
        "weight_bytes": checkpoint.type_bytes or None,
        "context": checkpoint.context,
        "vocab_size": text_config(checkpoint.raw).get("vocab_size"),
        "text_only": decoder_of(checkpoint.raw) is not None and not checkpoint.sees,
        "tokenizer": tokenizer(checkpoint),
        "chat_template": None
        if template is None
        else {"characters": len(template), "tools": "tools" in template},
        "sampling": sampling(checkpoint),
        "license": license_of(checkpoint),
        "size": checkpoint.size,
        "files": checkpoint.files,
        "config": checkpoint.raw,
    }


def chat_template(checkpoint: Checkpoint) -> str | None:
    """Return the model's chat template: of several the one named default, else the first."""
    own = checkpoint.read("chat_template.jinja")
    if own:
        return own
    files = "chat_template.json", "tokenizer_config.json"
    named = next((found for file in files if (found := _template_in(checkpoint, file))), None)
    if isinstance(named, list):
        several = {one.get("name"): one.get("template") for one in named if isinstance(one, dict)}
        named = several.get("default", next(iter(several.values()), None))
    if named is None and checkpoint.folder is not None:
        others = (checkpoint.folder / "additional_chat_templates").glob("*.jinja")
        named = next((read_text(file, errors="replace") for file in sorted(others)), None)
    return named if isinstance(named, str) else None


def _template_in(checkpoint: Checkpoint, file: str) -> Any:
    return _json(checkpoint.read(file)).get("chat_template")


def tokenizer(checkpoint: Checkpoint) -> str | None:
    """Return the tokenizer's class and file, or None."""
    kind = _json(checkpoint.read("tokenizer_config.json")).get("tokenizer_class")
    known = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
    gguf = (name for name in checkpoint.files if name.endswith(".gguf"))
    file = next((name for name in (*known, *gguf) if name in checkpoint.files), None)
    return ", ".join(part for part in (kind, file) if part) or None


def license_of(checkpoint: Checkpoint) -> str | None:
    """Return the license in README.md's header, else the first line of LICENSE, else None.

    The header's format: https://huggingface.co/docs/hub/model-cards."""
    head = re.match(r"---\n(.*?)\n---", checkpoint.read("README.md"), re.DOTALL)
    named = re.search(
        r"^license(?:_name)?: *[\"']?([^\s\"']+)", head[1] if head else "", re.MULTILINE
    )
    if named:
        return named[1]
    lines = (checkpoint.read("LICENSE") or checkpoint.read("LICENSE.txt")).split("\n")
    return next((line.strip() for line in lines if line.strip()), None)


def _pictures(checkpoint: Checkpoint) -> str | None:
    """Say whether prompts may have pictures; None for a model that reads text."""
    if decoder_of(checkpoint.raw) is None or checkpoint.sound is not None:
        return None
    if checkpoint.sees:
        assert checkpoint.sight is not None
        tower = checkpoint.sight.tower
        side = tower.merge * tower.patches.size
        return f"yes: a token for {side} x {side} pixels, {len(tower.blocks)} layers"
    if checkpoint.sight is not None:
        return f"no: there is no {' or '.join(FILES)}"
    return "no: tk leaves the tower out"


def _sound(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """Say what a model does with sound; nothing if it does not hear."""
    if not checkpoint.problem and checkpoint.hears:
        return [("sound", "transcribed: see tk transcribe")]
    if checkpoint.sound is None:
        return []
    tower = checkpoint.sound.tower
    rows = tower.num_rows(SAMPLE_RATE)
    return [("sound", f"yes: {rows} tokens for each second, {len(tower.blocks)} layers")]


def _facts(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    problem = checkpoint.problem
    parameters, stored = checkpoint.num_parameters, checkpoint.stored_type
    number = count(parameters) if parameters else "unknown (no safetensors header)"
    if active := None if problem else checkpoint.num_active:
        number += f", {count(active)} active for each token"
    template = chat_template(checkpoint)
    context = checkpoint.context
    facts = [
        ("architecture", _architecture(checkpoint)),
        ("parameters", f"{number}{f', stored in {stored}' if stored else ''}"),
        *_quantization(checkpoint),
        *_weights(checkpoint),
        ("context", f"{context:,} tokens" if context else "unknown (not in config.json)"),
        *([] if problem else _shape(checkpoint)),
        *([] if (pictures := _pictures(checkpoint)) is None else [("pictures", pictures)]),
        *_sound(checkpoint),
        ("tokenizer", tokenizer(checkpoint) or "none"),
        (
            "chat template",
            "none"
            if template is None
            else f"{len(template):,} characters, {_tool_support(template)}",
        ),
        *([] if not problem and checkpoint.hears else [("sampling", sampling(checkpoint))]),
        ("license", license_of(checkpoint) or "not in its files"),
        ("files", _files(checkpoint)),
        (
            "location",
            str(checkpoint.folder or f"on the hub; tk pull {checkpoint.name} downloads it"),
        ),
    ]
    return facts if problem else [*facts, ("runs here", _fit(checkpoint))]


def sampling(checkpoint: Checkpoint) -> str:
    """Describe the defaults of requests: generation_config.json's, or a GGUF file's."""
    from toolkit.sampling.params import default_sampling, describe_sampling

    try:
        found = default_sampling(parse_json(checkpoint.read("generation_config.json") or "{}"))
    except (ValueError, TypeError, AttributeError) as error:
        return f"generation_config.json cannot be used: {error}"
    return describe_sampling(found)


def _quantization(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """Return how this machine keeps quantized weights in memory, most common layouts first."""
    if checkpoint.problem is not None or checkpoint.packings is None:
        return []
    packings, on_gpu = checkpoint.packings, find_device().kind == "cuda"
    counts: Counter[str] = Counter()
    for one in checkpoint.parameters:
        packing = packings.find(one.name.removesuffix(".weight"))
        if packing is not None:
            is_expert = one.kind == "expert"
            counts[str(on_device(packing.layout, on_gpu=on_gpu, is_expert=is_expert))] += 1
    if not counts:
        return []
    layouts = "; ".join(layout for layout, _ in counts.most_common())
    return [("in memory", f"{layouts} ({packings.method})")]


def _weights(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """Return the line about stored weights, if they have several types."""
    types, bits = checkpoint.type_bytes, checkpoint.bits_per_weight
    if bits is None or len(types) < 2:
        return []
    total = sum(types.values())
    parts = ", ".join(f"{size(num_bytes)} in {name}" for name, num_bytes in types.items())
    return [("weights", f"{bits:.2f} bits per weight, {total:,} bytes: {parts}")]


def _architecture(checkpoint: Checkpoint) -> str:
    if checkpoint.problem:
        return f"{checkpoint.architecture} - {checkpoint.problem}"
    is_ours = checkpoint.implementation == "toolkit"
    how = "" if is_ours else " through Transformers, if its code there allows that"
    return f"{checkpoint.architecture}{how}"


def _shape(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    config = checkpoint.config
    heads = config.num_attention_heads
    memory = (one for one in checkpoint.description.memory if isinstance(one, TokenMemory))
    parts = list(dict.fromkeys(one.parts[0] for one in memory))
    kv_heads = dict.fromkeys(str(part.num_heads) for part in parts)
    kv = (
        ""
        if list(kv_heads) in ([], [str(heads)])
        else f", {' or '.join(kv_heads)} for keys and values"
    )
    sizes = dict.fromkeys(str(part.size) for part in parts)
    of = f" of {' or '.join(sizes)}" if sizes else ""
    return [
        (
            "shape",
            f"{config.num_hidden_layers} layers, hidden size {config.hidden_size:,}, "
            f"{heads} heads{of}{kv}, vocabulary of {config.vocab_size:,}",
        ),
        *_windows(checkpoint),
    ]


def _windows(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """Say which tokens layers keep, if some do not keep all of a request's."""
    memory = (one for one in checkpoint.description.memory if isinstance(one, TokenMemory))
    counts = Counter(CacheGroup(one.window, one.chunk, feature=one.feature) for one in memory)
    if not any(group.frees or group.feature for group in counts):
        return []
    parts = (group.kept_by(count) for group, count in counts.most_common())
    return [("KV cache", ", ".join(parts))]


def _tool_support(template: str) -> str:
    return "supports tools" if "tools" in template else "tools are described in messages"


def _files(checkpoint: Checkpoint) -> str:
    largest = sorted(checkpoint.files.items(), key=lambda file: -file[1])
    lines = [f"{len(largest)}, {size(checkpoint.size)}"]
    lines += [f"{size(num_bytes):>10}  {name}" for name, num_bytes in largest[:MAX_FILES]]
    return "\n".join([*lines, f"{'':>10}  ..."] if len(largest) > MAX_FILES else lines)


def _fit(checkpoint: Checkpoint) -> str:
    device = find_device()
    try:
        if checkpoint.implementation == "transformers" and checkpoint.folder is not None:
            # Its code decides, which takes seconds to import.
            import_module("toolkit.models.build").load_config(checkpoint.folder)
        fit: Estimate = estimate(checkpoint, EngineConfig(), device)
    except ToolkitError as error:
        return f"no: {error.message}"
    where = f"on {device.name}, {size(device.free)} free"
    if fit.problem:
        verdict = f"with up to {fit.largest_context:,} tokens" if fit.largest_context else "no"
        return f"{verdict} ({where}). {fit.problem}"
    cache = f", with a KV cache of {fit.num_tokens:,} tokens" if fit.has_cache else ""
    return f"yes ({where}): {size(fit.weights)} of weights in {fit.weight_type}{cache}"


def _json(text: str) -> dict[str, Any]:
    try:
        content = parse_json(text or "{}")
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
