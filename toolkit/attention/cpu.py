"""The CPU backend: C++ kernels that read the cache in place.

Where they cannot run (not built, a cache in FP8 or float16, heads larger than 512) each request's
keys and values are gathered for PyTorch's fused attention, which takes 2 to 6 times as long in a
decode step. It has no soft cap and no sinks: such layers take the plain operations."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from toolkit.attention.backend import (
    AttentionBackend,
    AttentionBatch,
    AttentionLayer,
    AttentionShape,
)
from toolkit.kernels import cpu, reference
from toolkit.kernels.cpu.attention import DTYPES, MAX_HEAD_SIZE, AttentionStep, Layer


@dataclass(slots=True)
class _Part:
    """One request's queries and keys, for layers with one window or chunk."""

    queries: slice  # of the step's tokens
    keys: slice  # of the gathered tokens
    is_causal: bool  # True if the queries are the whole context
    mask: torch.Tensor | None
    """[query_len, key_len], True where visible. None: queries see all keys up to themselves."""


@dataclass(slots=True)
class _Plan:
    blocks: torch.Tensor  # of the gathered tokens in the cache, int64
    places: torch.Tensor  # in these blocks
    parts: list[_Part]


class CPUBackend(AttentionBackend):
    name = "cpu"
    takes_slices = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._layers: dict[tuple[int, int], Layer] = {}
        """By identity, and address of their keys: layers of two groups may have the same."""

    @classmethod
    def unsupported_reason(
        cls, device: torch.device, dtype: torch.dtype, head_size: int, block_size: int
    ) -> str | None:
        return None if device.type == "cpu" else "needs a CPU"

    def write(
        self, layer: AttentionLayer, qkv: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        return self._transform(layer, qkv, batch, layer.shape.num_kv_heads)

    def turn(
        self, layer: AttentionLayer, query: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        return self._transform(layer, query, batch, 0)

    def _transform(
        self, layer: AttentionLayer, qkv: torch.Tensor, batch: AttentionBatch, num_kv_heads: int
    ) -> torch.Tensor:
        arguments, key = layer.transform.arguments(batch), _key(layer)
        kernels = self._layers.get(key)
        if kernels is None and kernels_support(layer.k_cache.dtype, layer.shape.head_size):
            kernels = self._layers[key] = _kernels_of(layer, writes=num_kv_heads > 0)
        if kernels is not None:
            return kernels.write(
                qkv, _step(layer, batch), arguments["cos_sin"], arguments["q_cos_sin"]
            )
        return reference.qk_norm_rope_write(
            qkv.contiguous(),
            batch.tables[layer.group].slots,
            layer.k_cache,
            layer.v_cache,
            num_heads=layer.shape.num_heads,
            num_kv_heads=num_kv_heads,
            **arguments,
        )

    def attend(
        self, layer: AttentionLayer, query: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        kernels = self._layers.get(_key(layer))
        if kernels is not None:
            return kernels.attend(query, _step(layer, batch))
        return _gathered(query, layer, batch)


def kernels_support(dtype: torch.dtype, head_size: int) -> bool:
    """Return True if the kernels attend over keys in this type."""
    return cpu.available() and dtype in DTYPES and head_size <= MAX_HEAD_SIZE


def _key(layer: AttentionLayer) -> tuple[int, int]:
    return id(layer), layer.k_cache.data_ptr()


def _kernels_of(layer: AttentionLayer, *, writes: bool) -> Layer:
    shape, transform = layer.shape, layer.transform
    return Layer(
        layer.k_cache,
        layer.v_cache,
        shape.num_heads,
        scale=shape.scale,
        sliding_window=shape.sliding_window,
        chunk=shape.chunk,
        soft_cap=shape.soft_cap,
        sinks=shape.sinks,
        norm=transform.norm,
        clip=transform.clip,
        writes=writes,
    )


def _step(layer: AttentionLayer, batch: AttentionBatch) -> AttentionStep:
    """Return the kernels' view of a step, the same for all layers of a group."""
    key = "step", layer.group
    step: AttentionStep | None = batch.plan.get(key)
    if step is None:
        step = batch.plan[key] = AttentionStep(
            batch.tables[layer.group].slots,
            batch.query_start_loc,
            batch.seq_lens,
            batch.rows,
            batch.tables[layer.group].blocks,
            batch.last_key,
        )
    return step


def _gathered(query: torch.Tensor, layer: AttentionLayer, batch: AttentionBatch) -> torch.Tensor:
    shape, block_size = layer.shape, layer.k_cache.shape[1]
    reach = shape.sliding_window, shape.chunk
    key = layer.group, *reach
    plan = batch.plan.get(key)
    if plan is None:
        table = batch.tables[layer.group].blocks
        plan = batch.plan[key] = _plan(batch, table, block_size, *reach)
    keys, values = (
        cache[plan.blocks, plan.places].to(query.dtype) for cache in (layer.k_cache, layer.v_cache)
    )
    out = torch.empty(query.shape, dtype=query.dtype)
    group = shape.num_heads // shape.num_kv_heads
    for part in plan.parts:
        q, k, v = (
            query[part.queries],
            keys[part.keys].transpose(0, 1),
            values[part.keys].transpose(0, 1),
        )
        if shape.soft_cap or shape.sinks is not None:
            out[part.queries] = _plain(q, k, v, shape, part.mask)
        elif len(q) == 1:
            # One query token: the heads that share a KV head become rows of one matrix.
            rows = q.view(1, shape.num_kv_heads, group, shape.head_size)
            result = F.scaled_dot_product_attention(rows, k[None], v[None], scale=shape.scale)
            out[part.queries] = result.view_as(q)
        else:
            result = F.scaled_dot_product_attention(
                q.transpose(0, 1)[None],
                k[None],
                v[None],
                attn_mask=part.mask,
                is_causal=part.is_causal,
                scale=shape.scale,
                enable_gqa=group > 1,
            )
            out[part.queries] = result[0].transpose(0, 1)
    return out


def _plain(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    shape: AttentionShape,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Return one request's attention, head by head: the logits take much memory.

    query: [query_len, num_heads, head_size]; keys, values: [num_kv_heads, key_len, head_size];
    mask: of `_Part`."""
    if mask is None:
        mask = torch.ones(len(query), keys.shape[1], dtype=torch.bool)
        mask = mask.tril(keys.shape[1] - len(query))
    hidden = ~mask
    out = torch.empty(query.shape)
    group = shape.num_heads // shape.num_kv_heads
    for head in range(shape.num_heads):
        logits = query[:, head].float() @ keys[head // group].float().T * shape.scale
        if shape.soft_cap:
            logits = shape.soft_cap * torch.tanh(logits / shape.soft_cap)
        logits = logits.masked_fill_(hidden, -torch.inf)
        if shape.sinks is not None:
            logits = F.pad(logits, (0, 1), value=float(shape.sinks[head]))
        weights = logits.softmax(-1)[:, : keys.shape[1]]
        out[:, head] = weights @ values[head // group].float()
    return out


def _plan(
    batch: AttentionBatch, blocks: torch.Tensor, block_size: int, window: int, chunk: int
) -> _Plan:
    table, rows = blocks.numpy(), batch.rows.tolist()
    gathered, places, parts = [], [], []
    query_start = key_start = 0
    for row, query_len, context_len in zip(
        rows, batch.query_start_loc.diff().tolist(), batch.seq_lens.tolist(), strict=True
    ):
        first_key = max(0, reference.first_key(context_len - query_len, window, chunk))
        positions = np.arange(first_key, context_len)
        gathered.append(table[row, positions // block_size].astype(np.int64))
        places.append(positions % block_size)
        key_len = context_len - first_key
        queries = slice(query_start, query_start + query_len)
        last_key = None if batch.last_key is None else batch.last_key[queries]
        is_masked = query_len > 1 and (
            last_key is not None
            or query_len < key_len
            or reference.first_key(context_len - 1, window, chunk) > first_key
        )
        mask = None
        if is_masked:
            keys = torch.arange(first_key, context_len)
            own = keys[-query_len:]
            mask = keys <= (own if last_key is None else last_key)[:, None]
            mask &= keys >= reference.first_key(own, window, chunk)[:, None]
        parts.append(
            _Part(
                queries=queries,
                keys=slice(key_start, key_start + key_len),
                is_causal=query_len > 1 and not is_masked,
                mask=mask,
            )
        )
        query_start += query_len
        key_start += key_len
    own_blocks, own_places = (torch.from_numpy(np.concatenate(one)) for one in (gathered, places))
    return _Plan(own_blocks, own_places, parts)
