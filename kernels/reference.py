"""Paged attention in plain PyTorch: slow, short, and the ground truth for every other kernel.

The KV cache of a layer is two tensors `[num_blocks, block_size, num_kv_heads, head_size]`. A request owns the
blocks listed in its row of the block table; its token at position p lies in block `row[p // block_size]` at
offset `p % block_size`. The queries of all requests of a step are packed one after another.
"""

from __future__ import annotations

import torch
from torch import Tensor


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
) -> Tensor:
    """Causal attention of packed queries over their requests' cached keys and values, in fp32.

    q: `[num_tokens, num_heads, head_size]`; query_start_loc: `[num_reqs + 1]`; seq_lens: `[num_reqs]`, the
    whole context, including this step's tokens, which are already in the cache; block_table:
    `[num_reqs, max_blocks]`. The queries of a request are its last positions. A query sees itself and what
    comes before it, `sliding_window` tokens in all where that is not 0. `soft_cap` bounds the logits: cap *
    tanh(logits / cap) (Gemma 2, arXiv:2408.00118). Head h reads KV head `h // (num_heads // num_kv_heads)`.

    Returns `[num_tokens, num_heads, head_size]` in q's dtype; tokens past the last request are 0.
    """
    block_size, num_kv_heads = k_cache.shape[1:3]
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    bounds = query_start_loc.tolist()
    for request, seq_len in enumerate(seq_lens.tolist()):
        first_token, last_token = bounds[request], bounds[request + 1]
        first_query = seq_len - (last_token - first_token)
        first_key = max(0, first_query - sliding_window + 1) if sliding_window else 0
        query_pos = torch.arange(first_query, seq_len, device=q.device)
        key_pos = torch.arange(first_key, max(seq_len, first_key), device=q.device)

        block = block_table[request, key_pos // block_size].long()
        k = k_cache[block, key_pos % block_size].float()  # [keys, num_kv_heads, head_size]
        v = v_cache[block, key_pos % block_size].float()
        queries = q[first_token:last_token].float()
        queries = queries.reshape(len(queries), num_kv_heads, -1, q.shape[2])

        logits = torch.einsum("qhgd,khd->hgqk", queries, k) * scale
        if soft_cap:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        visible = key_pos <= query_pos[:, None]
        if sliding_window:
            visible &= key_pos > query_pos[:, None] - sliding_window
        weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
        out[first_token:last_token] = torch.einsum("hgqk,khd->qhgd", weights, v).flatten(1, 2)
    return out.to(q.dtype)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store `k` and `v` `[num_tokens, num_kv_heads, head_size]` in the cache, in place.

    slot_mapping: int64 `[num_tokens]`, `block * block_size + offset`; tokens with negative slots are skipped.
    """
    block_size = k_cache.shape[1]
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    block, offset = slots // block_size, slots % block_size
    k_cache[block, offset] = k[kept]
    v_cache[block, offset] = v[kept]
