"""`tk show --layers`: a decoder's description, line by line."""

import dataclasses
from collections.abc import Iterator
from typing import Any, cast

from toolkit.errors import CheckpointError
from toolkit.inventory.checkpoint import Checkpoint
from toolkit.models.config.registry import describe, parse_config
from toolkit.models.describe import Branch, Decoder, Layer, Mix, Norm, Rope
from toolkit.models.memory import Memory, TokenMemory
from toolkit.weights.source import Source

INDENT = "    "
MOST = 8  # tensors of a kind that are listed: experts may have hundreds


def lines_of(checkpoint: Checkpoint) -> list[str]:
    """Return the description; for models without one, a line that says who computes them.

    Weights are not needed. Raises CheckpointError for an unsupported model."""
    try:
        described = describe(parse_config(checkpoint.raw))
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.name}: {error}.") from None
    if not isinstance(described, Decoder):
        kind = "Transformers computes it" if described.memory else "an encoder"
        return [f"{checkpoint.architecture}: {kind}; tk has no description of its layers."]
    return list(_decoder(described))


def _decoder(described: Decoder) -> Iterator[str]:
    hidden, vocab = described.hidden_size, described.vocab_size
    yield f"x = {described.embed}[token]  # {vocab:,} tokens of {hidden:,} numbers"
    if described.positions is not None:
        yield f"x += {described.positions.name}[position]"
    if described.embed_scale != 1.0:
        yield f"x *= {described.embed_scale:g}"
    if (inputs := described.layer_inputs) is not None:
        table, width = inputs.table, described.num_layers * inputs.size
        yield f"inputs of layers = {inputs.scale:.4g} · ("
        yield f"{INDENT}rms_norm({inputs.product.name}(x), {inputs.norm.name})"
        yield f"{INDENT}+ {inputs.factor:g} · {table.name}[token])  # {width:,} numbers"
    kinds: dict[str, list[int]] = {}
    for index, layer in enumerate(described.layers):
        name = f"{described.layers_name}.{index}."
        kinds.setdefault(repr(layer).replace(name, ""), []).append(index)
    for same in kinds.values():
        name = f"{described.layers_name}.{same[0]}."
        yield f"{_span(same)} ({described.layers_name}.N):"
        lines = _layer(described.layers[same[0]], hidden)
        yield from (f"{INDENT}{line.replace(name, '')}" for line in lines)
    scale = "" if described.head.scale == 1.0 else f" · {described.head.scale:g}"
    cap = f", soft cap {described.head.soft_cap:g}" if described.head.soft_cap else ""
    head = described.embed if described.is_tied else "lm_head"
    yield f"logits = {head}({_normed(described.norm)}){scale}{cap}"


def _span(layers: list[int]) -> str:
    """Return which layers these are: all of a range, or with equal distances, or a list."""
    first, last = layers[0], layers[-1]
    if len(layers) == 1:
        return f"layer {first}"
    distance = layers[1] - first
    if layers != list(range(first, last + 1, distance)):
        return f"layers {', '.join(map(str, layers))}"
    return f"layers {first} to {last}{f' by {distance}' if distance > 1 else ''}"


def _layer(layer: Layer, hidden: int) -> Iterator[str]:
    for step in layer:
        yield f"x += {' + '.join(map(_branch, step))}"
        if (factor := step[0].factor) is not None:
            yield f"x *= {factor}"
        for branch in step:
            for mix in branch.mix.parts:
                yield from (f"{INDENT}{line}" for line in _mix(mix, hidden))


def _branch(branch: Branch) -> str:
    text = f"{_name(branch.mix)}({_normed(branch.norm)})"
    if branch.post is not None:
        text = _normed(branch.post, text)
    return text if branch.scale == 1.0 else f"{branch.scale:g} · {text}"


def _normed(norm: Norm | None, x: str = "x") -> str:
    if norm is None:
        return x
    kind = "layer_norm" if norm.is_centered else "rms_norm"
    return f"{kind}({x}{'' if norm.name is None else f', {norm.name}'})"


def _name(mix: Mix) -> str:
    return type(mix).__name__.lower()


def _mix(mix: Mix, hidden: int) -> Iterator[str]:
    yield ": ".join(filter(None, (_name(mix), ", ".join(_options(mix)))))
    shown = dict.fromkeys(_projection(*one) for one in mix.projections(hidden))
    plain = [f"{name} {list(shape)}" for name, shape, _ in mix.plain(hidden)]
    for lines in ([*shown], plain):
        yield from (f"{INDENT}{line}" for line in lines[:MOST])
        if len(lines) > MOST:
            yield f"{INDENT}and {len(lines) - MOST} more"
    if mix.memory is not None:
        yield f"keeps {_memory(mix.memory)}"
    if mix.reads is not None:
        yield f"reads the memory of layer {mix.reads}"


def _options(mix: Mix) -> Iterator[str]:
    """Yield the fields whose values are not their defaults, but for names of tensors."""
    for field in dataclasses.fields(cast("Any", mix)):
        value = getattr(mix, field.name)
        if value == field.default or isinstance(value, Source | Mix | str | tuple | None):
            continue
        if not field.repr:
            continue
        if isinstance(value, Rope):
            given = {name: one for name, one in value.parameters.items() if one is not None}
            listed = ", ".join(f"{name} {one}" for name, one in sorted(given.items()))
            if value.rotates:
                yield f"rotation ({listed})"
            if value.query_scaling is not None:
                yield "queries scaled by position"
        elif dataclasses.is_dataclass(value):
            yield field.name
        else:
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            yield field.name if value is True else f"{field.name} {shown}"


def _projection(source: Source, rows: int, columns: int, has_bias: bool) -> str:
    return f"{source.name} [{rows}, {columns}]{' with bias' * has_bias}"


def _memory(memory: Memory) -> str:
    of = "request"
    if isinstance(memory, TokenMemory):
        of = f"of the newest {memory.window:,} tokens" if memory.window else "token"
        of += f" of the newest chunk of {memory.chunk:,}" if memory.chunk else ""
        of += f" of a clip of {memory.feature:,} tokens" if memory.feature else ""
    parts = " and ".join(
        f"{part.num_heads} x {part.size * max(1, part.last_tokens)}" for part in memory.parts
    )
    return f"{parts} numbers for each {of}"
