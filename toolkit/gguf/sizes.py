"""Compare the metadata of GGUF files with the shapes of their tensors."""

from __future__ import annotations

import re

from toolkit.gguf.architectures import Architecture
from toolkit.gguf.file import GGUFTensor
from toolkit.gguf.values import Values

LAYER = re.compile(r"blk\.(\d+)\.(.+\.(?:weight|bias)|ssm_a)")
"""Name of a tensor of a layer."""
MAX_EXPERTS = 4096
_SIZE, _SHARED_SIZE = "expert_feed_forward_length", "expert_shared_feed_forward_length"


def check_sizes(kind: Architecture, names: dict[str, GGUFTensor], values: Values) -> None:
    """Compare sizes with the tensors' shapes, so that no model of another size is built.

    Raises CheckpointError if they differ."""
    heads = values.size("attention.head_count")
    hidden = values.size("embedding_length")
    kv_heads = values.size("attention.head_count_kv", heads)
    head_size = values.size("attention.key_length", hidden // heads)
    inner = values.size("feed_forward_length", 4 * hidden)
    vocab_size = names["token_embd.weight"].shape[0]
    q, kv = heads * head_size, kv_heads * head_size
    expected: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocab_size, hidden),
        "position_embd.weight": (values.size("context_length"), hidden),
        "blk.0.attn_q.weight": (q, hidden),
        "blk.0.attn_k.weight": (kv, hidden),
        "blk.0.attn_qkv.weight": (q + 2 * kv, hidden),
        "blk.0.attn_output.weight": (hidden, q),
        "blk.0.ffn_down.weight": (hidden, inner),
    }
    count, drafting = values.size("block_count"), drafting_layers(values)
    layers = {int(match[1]) for name in names if (match := LAYER.fullmatch(name))}
    if count > len(names) or layers - set(drafting) != set(range(count - len(drafting))):
        raise values.error(f"block_count {count}, and tensors of {len(layers)} layers")
    if kind.has_delta_nets:
        expected |= _hybrid_shapes(names, values, (q, kv), range(count - len(drafting)))
    if kind.has_experts:
        expected |= _expert_shapes(kind, names, values, range(count - len(drafting)))
    for name, shape in expected.items():
        if name in names and names[name].shape != shape:
            raise values.error(
                f"sizes that give {name} the shape {list(shape)}, and it has "
                f"{list(names[name].shape)}"
            )


def _hybrid_shapes(
    names: dict[str, GGUFTensor], values: Values, rows: tuple[int, int], layers: range
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all layers' delta nets and gated attention.

    rows: of queries, and of keys. Raises CheckpointError if the numbers of heads cannot be."""
    q, kv = rows
    hidden, width = values.size("embedding_length"), values.size("ssm.conv_kernel")
    groups, heads = values.size("ssm.group_count"), values.size("ssm.time_step_rank")
    keys, inner = groups * values.size("ssm.state_size"), values.size("ssm.inner_size")
    if heads % groups or inner % heads:
        raise values.error(f"{heads} value heads of {groups} groups, with {inner} entries")
    net = {
        "attn_qkv.weight": (2 * keys + inner, hidden),
        "attn_gate.weight": (inner, hidden),
        "ssm_in.weight": (2 * keys + 2 * inner, hidden),
        "ssm_conv1d.weight": (2 * keys + inner, width),
        "ssm_a": (heads,),
        "ssm_out.weight": (hidden, inner),
    }
    attention = {
        "attn_q.weight": (2 * q, hidden),
        "attn_k.weight": (kv, hidden),
        "attn_output.weight": (hidden, q),
    }
    return {
        f"blk.{layer}.{own}": shape
        for layer in layers
        for own, shape in (net if f"blk.{layer}.ssm_a" in names else attention).items()
    }


def _expert_shapes(
    kind: Architecture, names: dict[str, GGUFTensor], values: Values, layers: range
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the MLPs and experts of all layers.

    Raises CheckpointError if the numbers of experts cannot be, or if a tensor is missing."""
    experts = _shapes_of_experts(kind, values)
    hidden = values.size("embedding_length")
    inner = values.size("feed_forward_length", 4 * hidden)
    first = values.number("leading_dense_block_count")
    step = values.size("interleave_moe_layer_step", 1)
    found: dict[str, tuple[int, ...]] = {}
    for layer in layers:
        has_experts = layer >= first and (layer + 1) % step == 0
        shapes = experts if has_experts else {"ffn_down": (hidden, inner)}
        found |= {f"blk.{layer}.{own}.weight": shape for own, shape in shapes.items()}
    missing = [name for name in found if name not in names]
    if missing:
        raise values.error(f"no tensor {missing[0]}")
    return found


def _shapes_of_experts(kind: Architecture, values: Values) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the matrices of one layer, by llama.cpp's names."""
    count, num_chosen = values.size("expert_count"), values.size("expert_used_count")
    if not num_chosen <= count <= MAX_EXPERTS:
        raise values.error(f"{count} experts, {num_chosen} for each token")
    hidden, has_own_size = values.size("embedding_length"), _SIZE in kind.fields
    size = values.size(_SIZE if has_own_size else "feed_forward_length")
    shared = values.number("expert_shared_count") * size
    if _SHARED_SIZE in kind.fields:
        shared = values.size(_SHARED_SIZE)
    inner = dict.fromkeys(("ffn_gate_exps", "ffn_up_exps"), (count, size, hidden))
    outer = {"ffn_down_exps": (count, hidden, size)}
    of_shared: dict[str, tuple[int, ...]] = {}
    if shared:
        of_shared = dict.fromkeys(("ffn_gate_shexp", "ffn_up_shexp"), (shared, hidden))
        of_shared["ffn_down_shexp"] = (hidden, shared)
    return {"ffn_gate_inp": (count, hidden), **inner, **outer, **of_shared}


def drafting_layers(values: Values) -> range:
    """Return the last layers, which only draft and which tk does not read."""
    count = values.number("nextn_predict_layers")
    if not count:
        return range(0)
    total = values.size("block_count")
    if count >= total:
        raise values.error(f"{total} layers, {count} of which only draft")
    return range(total - count, total)
