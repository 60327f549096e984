"""Queries, keys and values of the QKV projection, in plain PyTorch."""

import torch
import torch.nn.functional as F

from toolkit.attention.backend import AttentionBatch, AttentionShape, HeadTransform


def split_heads(
    qkv: torch.Tensor, batch: AttentionBatch, shape: AttentionShape, transform: HeadTransform
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split qkv into heads. Return (queries, keys, values), queries and keys transformed.

    qkv: [num_tokens, (num_heads + 2 · num_kv_heads) · head_size].
    Returns [num_tokens, num_heads, head_size], and twice [num_tokens, num_kv_heads, head_size]."""
    heads = qkv.view(len(qkv), -1, shape.head_size)
    q, k, v = torch.split(heads, [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
    if transform.q_weight is not None and transform.k_weight is not None:
        q = F.rms_norm(q, (shape.head_size,), transform.q_weight, transform.eps)
        k = F.rms_norm(k, (shape.head_size,), transform.k_weight, transform.eps)
    if transform.cos_sin is not None:
        cos, sin = _angles(batch, transform.cos_sin)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    return q, k, v


def _angles(batch: AttentionBatch, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cosines, sines) of the step's positions, gathered once for all layers.

    Each is [num_tokens, 1, rotary_size / 2]."""
    found: tuple[torch.Tensor, torch.Tensor] | None = batch.plan.get(("angles", id(table)))
    if found is None:
        angles = table[batch.positions]
        found = batch.plan["angles", id(table)] = (angles[:, 0, None], angles[:, 1, None])
    return found


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + rotary_size / 2) of the first dimensions (Su et al., 2021)."""
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    parts = [first * cos - second * sin, second * cos + first * sin]
    if x.shape[-1] > 2 * half:
        parts.append(x[..., 2 * half :])
    return torch.cat(parts, dim=-1)
