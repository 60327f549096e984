"""The kernels in plain PyTorch: slow, short, and the ground truth for every other version.

The KV cache of a layer is two tensors `[num_blocks, block_size, num_kv_heads, head_size]` in the
queries' dtype or FP8. A request owns the blocks in its row of the block table. Its token at
position p is in block `row[p // block_size]` at offset `p % block_size`. The queries of a step's
requests are packed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.kernels import mxfp4
from toolkit.kernels.gates import Gate

Position = TypeVar("Position", int, Tensor)

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # greatest number of e4m3 (Micikevicius et al., arXiv:2209.05433)
FP8_MIN_GREATEST = 2.0**-100
"""Least maximum of a row, so that the scale of zeros has a finite inverse."""
MIXER_DISTANCE = 0.02
"""Largest difference to the chosen logit, over the greater of that and the logit's magnitude."""
FP8_BLOCK = 128
"""Rows and columns of a block of an FP8 weight. Of x, the elements with one scale."""


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
    chunk: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    last_key: Tensor | None = None,
) -> Tensor:
    """Attend causally from packed queries to their requests' cached keys and values, in fp32.

    q: `[num_tokens, num_heads, head_size]`; query_start_loc: `[num_reqs + 1]`; seq_lens:
    `[num_reqs]`, the context with this step's tokens, which are in the cache already; block_table:
    `[num_reqs, max_blocks]`. The queries of a request are its last positions. A query sees itself
    and earlier tokens: from `first_key` on. `soft_cap` bounds the logits: cap * tanh(logits / cap)
    (Gemma 2, arXiv:2408.00118). `sinks`, fp32 `[num_heads]`, are logits that join each softmax
    without a value (gpt-oss; Xiao et al., arXiv:2309.17453). Head h reads KV head `h // (num_heads
    // num_kv_heads)`.

    `last_key`, int32 `[num_tokens]`, is the position up to which each query sees: its own or a
    later one in the cache, never before that of the request's query ahead of it. `first_key` is
    still that of the query itself (Gemma 3's pictures, as in Transformers).

    Returns `[num_tokens, num_heads, head_size]` in q's dtype. Tokens past the last request are 0.
    """
    block_size, num_kv_heads = k_cache.shape[1:3]
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    bounds = query_start_loc.tolist()
    for request, seq_len in enumerate(seq_lens.tolist()):
        first_token, last_token = bounds[request], bounds[request + 1]
        first_query = seq_len - (last_token - first_token)
        first = max(0, first_key(first_query, sliding_window, chunk))
        query_pos = torch.arange(first_query, seq_len, device=q.device)
        key_pos = torch.arange(first, max(seq_len, first), device=q.device)

        block = block_table[request, key_pos // block_size].long()
        k = k_cache[block, key_pos % block_size].float()  # [keys, num_kv_heads, head_size]
        v = v_cache[block, key_pos % block_size].float()
        queries = q[first_token:last_token].float()
        queries = queries.reshape(
            len(queries), num_kv_heads, q.shape[1] // num_kv_heads, q.shape[2]
        )

        logits = torch.einsum("qhgd,khd->hgqk", queries, k) * scale
        if soft_cap:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        last = query_pos if last_key is None else last_key[first_token:last_token]
        visible = key_pos <= last[:, None]
        visible &= key_pos >= first_key(query_pos, sliding_window, chunk)[:, None]
        logits = logits.masked_fill(~visible, -torch.inf)
        if sinks is None:
            weights = logits.softmax(-1)
        else:
            sink = sinks.float().view(num_kv_heads, -1, 1, 1).expand(*logits.shape[:3], 1)
            weights = torch.cat((logits, sink), dim=-1).softmax(-1)[..., :-1]
        out[first_token:last_token] = torch.einsum("hgqk,khd->qhgd", weights, v).flatten(1, 2)
    return out.to(q.dtype)


def first_key(position: Position, sliding_window: int, chunk: int) -> Position:
    """Return the position of the first key that queries see; negative: they see all.

    It is that of their chunk of `chunk` tokens (Llama 4), or `sliding_window - 1` before them."""
    if chunk:
        return position // chunk * chunk
    return position - (sliding_window - 1) if sliding_window else position * 0


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store `k` and `v` `[num_tokens, num_kv_heads, head_size]` in the cache, in its dtype.

    slot_mapping: int64 `[num_tokens]`, `block * block_size + offset`. Negative slots are skipped.
    """
    block_size = k_cache.shape[1]
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    block, offset = slots // block_size, slots % block_size
    for x, cache in ((k, k_cache), (v, v_cache)):
        _bits(cache)[block, offset] = _bits(rounded(x[kept], cache.dtype))


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round x to another dtype. For FP8, x is clamped first. NaN stays NaN."""
    return x.float().clamp(-FP8_MAX, FP8_MAX).to(FP8) if dtype == FP8 else x.to(dtype)


def _bits(x: Tensor) -> Tensor:
    """View FP8 as bytes: not every device copies it by index."""
    return x.view(torch.uint8) if x.dtype == FP8 else x


class Norm(NamedTuple):
    """A layer norm (Ba et al., 2016) or an RMS norm (Zhang & Sennrich, 2019) of rows."""

    weight: Tensor  # [size], in the rows' type or fp32
    bias: Tensor | None  # [size], like the weight
    eps: float
    is_centered: bool  # layer norm: the mean is subtracted


def normalize(x: Tensor, norm: Norm) -> Tensor:
    """Return the norm of rows, in fp32."""
    weight, bias = norm.weight.float(), None if norm.bias is None else norm.bias.float()
    if norm.is_centered:
        return F.layer_norm(x.float(), weight.shape, weight, bias, norm.eps)
    y = F.rms_norm(x.float(), weight.shape, weight, norm.eps)
    return y if bias is None else y + bias


@dataclass(frozen=True, slots=True)
class Rounded:
    """Rows in FP8, about values * scales, for products with weights that have a scale per row."""

    values: Tensor  # FP8 [num_tokens, size]
    scales: Tensor  # fp32 [num_tokens, 1]
    dtype: torch.dtype  # before they were rounded to FP8, and of products

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, tokens: Tensor) -> Self:
        # Not every device copies FP8 by index.
        values = self.values.view(torch.int8)[tokens].view(FP8)
        return type(self)(values, self.scales[tokens], self.dtype)


def join(
    x: Tensor,
    residual: Tensor | None,
    norms: Sequence[Norm],
    *,
    other: Tensor | None = None,
    post: Norm | None = None,
    scale: float = 1.0,
    factor: Tensor | None = None,
    row_scales: Tensor | None = None,
) -> tuple[list[Tensor], Tensor]:
    """Return (norms of the sum, the sum): factor * (residual + scale * post(x + other)).

    x, residual, other: `[num_tokens, size]`; norms: at most two; factor: `[1]`. All is computed in
    fp32. The sum is rounded to the rows' type and written into `residual`; the norms are of the
    rounded sum. Without a residual the sum is x itself, and there must be no other, post, scale or
    factor. row_scales: buffer for those of the only norm, which is then in FP8, as in `Rounded`."""
    total = x
    if residual is not None:
        product = x.float() if other is None else x.float() + other.float()
        product = product if post is None else normalize(product, post)
        total = residual.float() + scale * product
        total = residual.copy_(total if factor is None else factor.float() * total)
    outs = [normalize(total, norm).to(x.dtype) for norm in norms]
    if row_scales is not None:
        (out,) = outs
        values, scales = quantize_fp8(out)
        row_scales.copy_(scales)
        outs = [values]
    return outs, total


def rms_norm_rows(x: Tensor, weight: Tensor, eps: float) -> None:
    """Apply an RMS norm in place. x: `[num_tokens, size]`; weight: `[size]`, x's type or fp32."""
    x.copy_(normalize(x, Norm(weight, None, eps, False)))


def embed_shard(indices: Tensor, table: Tensor, begin: int, count: int) -> Tensor:
    """Return rows `[n, size]` of a table that has `count` rows from `begin` on, or zeros."""
    is_own = (indices >= begin) & (indices < begin + count)
    return table[(indices.long() - begin).where(is_own, 0)] * is_own[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + half) of the first dimensions of fp32 heads.

    x: `[num_tokens, num_heads, head_size]`; cos, sin: `[num_tokens, half]`."""
    half = cos.shape[-1]
    cos, sin = cos.float()[:, None], sin.float()[:, None]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """Norm of each head of the queries and of the keys, without a bias."""

    q_weight: Tensor  # [1 or num_heads, head_size], in the model's type or fp32
    k_weight: Tensor  # [1 or num_kv_heads, head_size]
    eps: float
    is_centered: bool = False  # layer norm instead of RMS norm: Cohere, StableLM
    is_last: bool = False  # after the rotation instead of before it: HunYuan
    norms_values: bool = False  # values, too, without a weight: Gemma 4

    def apply(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Norm fp32 heads `[num_tokens, num_heads, head_size]` by one of the weights. None: 1."""
        if self.is_centered:
            x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return x if weight is None else x * weight.float()


def qk_norm_rope_write(
    qkv: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    cos_sin: Tensor | None = None,
    q_cos_sin: Tensor | None = None,
    norm: HeadNorm | None = None,
    clip: float = 0.0,
) -> Tensor:
    """Return the queries of rows q | k | v, and store keys and values in the cache.

    First all three are clamped to ±clip unless that is 0. Then queries and keys are normed (unless
    the norm is last), rotated by each token's angles `cos_sin` `[num_tokens, 2, half]` (queries by
    `q_cos_sin` if that is given), and normed if the norm is last. Values are normed if
    `norms_values`. All is computed in fp32 and rounded once. With 0 KV heads, rows are queries
    alone, and nothing is stored. Returns `[num_tokens, num_heads, head_size]`."""
    heads = qkv.reshape(len(qkv), -1, k_cache.shape[3]).float()
    if clip:
        heads = heads.clamp(-clip, clip)
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if norm is not None and not norm.is_last:
        q, k = norm.apply(q, norm.q_weight), norm.apply(k, norm.k_weight)
    if cos_sin is not None:
        q = rotate(q, *(cos_sin if q_cos_sin is None else q_cos_sin).unbind(1))
        k = rotate(k, *cos_sin.unbind(1))
    if norm is not None and norm.is_last:
        q, k = norm.apply(q, norm.q_weight), norm.apply(k, norm.k_weight)
    if norm is not None and norm.norms_values:
        v = norm.apply(v, None)
    if num_kv_heads:
        write_kv(k, v, k_cache, v_cache, slot_mapping)
    return q.to(qkv.dtype)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
"""Activation functions by kind: see `triton.activation.KINDS`."""


def gate_by(gate: Tensor, up: Tensor, kind: Gate) -> Tensor:
    """Return act(gate) * up, or the function of `gates.ClampedSwiGLU`."""
    if isinstance(kind, str):
        return ACTIVATIONS[kind](gate) * up
    gate, up = gate.clamp(max=kind.limit), up.clamp(-kind.limit, kind.limit)
    return gate * torch.sigmoid(kind.alpha * gate) * (up + 1)


def activation(x: Tensor, kind: str) -> Tensor:
    """Return act(x), computed in fp32."""
    return ACTIVATIONS[kind](x.float()).to(x.dtype)


def gated_activation(gate_up: Tensor, kind: str) -> Tensor:
    """Return act(gate) * up of rows gate | up, computed in fp32."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return gate_by(gate, up, kind).to(gate_up.dtype)


def soft_cap_(logits: Tensor, cap: float) -> None:
    """Replace logits by cap * tanh(logits / cap), in fp32 (Gemma 2, arXiv:2408.00118)."""
    logits.copy_(cap * torch.tanh(logits.float() / cap))


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
) -> Tensor:
    """Return act(x Wᵀ + b), or act(gate) * up if W holds gate's rows, then up's, in fp32."""
    y = F.linear(x.float(), weight.float(), bias.float() if bias is not None else None)
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = (ACTIVATIONS[activation](gate) if activation else gate) * up
    elif activation:
        y = ACTIVATIONS[activation](y)
    return y.to(x.dtype)


class Routing(NamedTuple):
    """Choice of experts from a router's logits."""

    num_chosen: int  # experts of a token
    scores: str = "softmax"  # of the logits, "sigmoid", or "sparsemixer" (`_mixed_sparsely`)
    renormalize: bool = False  # divide the chosen scores by their sum
    num_groups: int = 1  # of as many adjacent experts each
    num_chosen_groups: int = 1  # groups that experts are chosen from
    scale: float = 1.0  # of the weights


def route(
    logits: Tensor,
    routing: Routing,
    bias: Tensor | None = None,
    slots: Tensor | None = None,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the experts of each token and their weights: int32 and fp32 `[n, num_chosen]`.

    logits: `[n, num_experts]`; bias: `[num_experts]`, added to the scores for the choice only
    (DeepSeek-V3, arXiv:2412.19437). Groups are chosen by their best score (DeepSeek-V2,
    arXiv:2405.04434) or, with a bias, by the sum of their two best. Of equal ones the first is
    chosen. slots: `[n]`; tokens with a negative one have experts -1 and weights 0. factors:
    `[num_experts]`, multiply the weights (Gemma 4)."""
    logits = logits.float()
    scores = logits
    if routing.scores != "sparsemixer":
        scores = logits.sigmoid() if routing.scores == "sigmoid" else logits.softmax(-1)
    rank = scores if bias is None else scores + bias.float()
    if routing.num_chosen_groups < routing.num_groups:
        size = rank.shape[1] // routing.num_groups
        groups = rank.view(len(rank), routing.num_groups, size)
        best = groups.topk(1 if bias is None else 2, dim=-1).values.sum(-1)
        chosen = best.sort(dim=-1, descending=True, stable=True).indices
        excluded = torch.ones_like(best, dtype=torch.bool)
        excluded.scatter_(1, chosen[:, : routing.num_chosen_groups], False)
        rank = groups.masked_fill(excluded[..., None], -torch.inf).flatten(1)
    ids = rank.sort(dim=-1, descending=True, stable=True).indices[:, : routing.num_chosen]
    weights = scores.gather(1, ids)
    if routing.scores == "sparsemixer":
        weights = _mixed_sparsely(logits, ids)
    if routing.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights * routing.scale
    if factors is not None:
        weights = weights * factors[ids]
    if slots is not None:
        ids = ids.masked_fill(slots[:, None] < 0, -1)
        weights = weights.masked_fill(slots[:, None] < 0, 0)
    return ids.int(), weights


def _mixed_sparsely(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the weights of SparseMixer-v2 (arXiv:2409.12136): each choice's softmax.

    It is over the experts that are not chosen earlier, and whose logits are near the choice's."""
    left, weights = logits.clone(), []
    for choice in range(ids.shape[1]):
        one = ids[:, choice : choice + 1]
        best = logits.gather(1, one)
        is_far = (best - logits) / logits.abs().maximum(best) > MIXER_DISTANCE
        weights.append(left.masked_fill(is_far, -torch.inf).softmax(-1).gather(1, one))
        left.scatter_(1, one, -torch.inf)
    return torch.cat(weights, dim=1)


class Stack(NamedTuple):
    """A weight [rows, columns] of each expert of a layer.

    Contiguous, but for integers: those of all experts are one weight (`triton.grouped_layout`)."""

    values: Tensor
    """[num_experts, rows, columns], of x's type or FP8; int16 [num_experts, steps, rows, 32] of
    MXFP4 (`mxfp4`); uint16 [num_experts, steps, rows, words of a step] of integers."""
    scale: Tensor | None = None
    """fp32 [num_experts, rows] of FP8, or [num_experts, blocks of rows, blocks of columns]; int32
    [num_experts, steps, rows] of MXFP4; [num_experts, groups, rows] of integers."""
    bias: Tensor | None = None  # [num_experts, rows], of x's type
    offset: Tensor | None = None  # of integers, like their scales

    def expert(self, index: int, columns: int) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of one expert in fp32. `columns`: of the weight."""
        values, bias = self.values[index], None if self.bias is None else self.bias[index].float()
        if self.scale is None:
            return values.float(), bias
        scale = self.scale[index]
        if values.dtype == torch.int16:
            return mxfp4.dequantize(values, scale)[:, :columns], bias
        if values.dtype == torch.uint16:
            offset = None if self.offset is None else self.offset[index]
            return _integers(values, scale, offset, columns), bias
        if scale.dim() == 1:
            return values.float() * scale[:, None], bias
        rows = scale.repeat_interleave(FP8_BLOCK, 0)
        return values.float() * rows.repeat_interleave(FP8_BLOCK, 1)[:, :columns], bias


def _integers(values: Tensor, scale: Tensor, offset: Tensor | None, columns: int) -> Tensor:
    """Return fp32 [rows, columns] of uint16 [steps, rows, words] and numbers [groups, rows]."""
    steps, rows, words = values.shape
    planes = columns // steps // words
    bits = 16 // planes
    wide = values.view(torch.int16).int() & 0xFFFF
    numbers = torch.stack([wide >> bits * nth & 2**bits - 1 for nth in range(planes)], 2)
    numbers = numbers.transpose(0, 1).reshape(rows, len(scale), -1).float()
    scales = scale.T.float()[..., None]
    shift = -(2 ** (bits - 1)) * scales if offset is None else offset.T.float()[..., None]
    weight: Tensor = numbers * scales + shift
    return weight.flatten(1)


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Stack,
    down: Stack,
    activation: Gate,
    interleaved: bool = False,
) -> Tensor:
    """Return the weighted sum of what each token's experts compute, in fp32.

    x: `[n, hidden]`; ids, weights: of `route`, or -1 for no expert; up: `2 * size` rows of
    `hidden`, gate's, then up's, or in turn if `interleaved`; down: `hidden` rows of `size`. The
    gated products are rounded to the type of x."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(len(up.values)):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        if len(token):
            y = linear(x[token].float(), *up.expert(expert, x.shape[1]))
            gate, up_y = (y[:, ::2], y[:, 1::2]) if interleaved else y.chunk(2, dim=1)
            inner = gate_by(gate, up_y, activation).to(x.dtype)
            part = linear(inner.float(), *down.expert(expert, inner.shape[1]))
            out.index_add_(0, token, part * weights[token, choice, None])
    return out.to(x.dtype)


def quantize_fp8(x: Tensor, size: int | None = None) -> tuple[Tensor, Tensor]:
    """Return (rows in FP8, fp32 scales `[..., groups]`) of x `[..., columns]`.

    The maximum of each group of `size` columns becomes FP8_MAX. None: a row is one group."""
    columns = x.shape[-1]
    size = size or columns
    groups = -(-columns // size)
    x = F.pad(x.float(), (0, groups * size - columns)).reshape(*x.shape[:-1], groups, size)
    greatest = x.abs().amax(-1, keepdim=True).clamp(min=FP8_MIN_GREATEST)
    # A tensor: with a Python number, PyTorch's division rounds twice.
    limit = torch.full_like(greatest, FP8_MAX)
    values = rounded(x * (limit / greatest), FP8).flatten(-2)[..., :columns]
    return values.contiguous(), (greatest / limit)[..., 0]


def round_to_fp8(x: Tensor) -> Tensor:
    """Return rows rounded to FP8 times a scale for each FP8_BLOCK elements, in fp32."""
    values, scales = quantize_fp8(x, FP8_BLOCK)
    return values.float() * scales.repeat_interleave(FP8_BLOCK, 1)[:, : x.shape[1]]


def linear_scaled(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
) -> Tensor:
    """Compute `linear` with an 8-bit weight and fp32 scales `[weight's rows]`.

    If it is FP8, the scales may be those of its blocks, `[blocks of rows, blocks of columns]`."""
    rows, columns = weight.shape
    if scale.dim() == 1:
        scale = scale[:, None]
    else:
        scale = scale.repeat_interleave(FP8_BLOCK, 0)[:rows]
        scale = scale.repeat_interleave(FP8_BLOCK, 1)[:, :columns]
    y = linear(x.float(), weight.float() * scale, bias, activation, gated)
    return y.to(x.dtype)


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (rows in int8, fp32 scales `[rows, 1]`). Each row's maximum becomes 127."""
    x = x.float()
    greatest = x.abs().amax(-1, keepdim=True)
    scale = greatest / torch.full_like(greatest, 127)
    factor = torch.where(scale > 0, 1 / scale, 0)
    return (x * factor).round().to(torch.int8), scale


def round_to_int8(x: Tensor, size: int) -> Tensor:
    """Return rows rounded to int8 times a scale for each `size` elements, if they divide a row."""
    grouped = x.reshape(len(x), -1, size if x.shape[1] % size == 0 else x.shape[1])
    values, scales = quantize_int8(grouped)
    return (values * scales).view(x.shape).to(x.dtype)


def linear_int8(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
) -> Tensor:
    """Compute `linear` with an int8 weight and fp32 scales `[weight's rows]`, and x in int8."""
    rows, x_scale = quantize_int8(x)
    products = (rows.double() @ weight.double().T).float() * (scale * x_scale)
    y = linear(products, torch.eye(len(weight)), bias, activation, gated)
    return y.to(x.dtype)


def sample(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    floats: Tensor,
    ints: Tensor,
    token_ids: Tensor | None,
    out: Tensor,
) -> None:
    """Choose tokens, and write them into `out` and the state. See `triton.sampling.sample`."""
    for entry, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
        if position < 0:
            out[entry] = -2
            continue
        temperature, top_p, min_p = floats[row, :3].tolist()
        top_k, seed = ints[row, :2].tolist()
        out[entry] = choose(logits[entry], temperature, top_k, top_p, min_p, seed, position)
        if token_ids is not None:
            token_ids[row, position] = out[entry].clamp(min=0)


def choose(
    logits: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    position: int,
) -> int:
    """Return a token for one row of logits `[vocab]`, in fp64; -1 if they are not finite.

    Of the tokens that pass top-k, min-p and top-p, it has the least exponential number divided by
    its weight: the Gumbel-max trick (Maddison et al., arXiv:1411.0030). A token wins with a
    probability proportional to its weight. At equal keys, similar logits mostly yield the same
    token."""
    logits = logits.double()
    best = logits.max()
    if not best.isfinite():
        return -1
    if temperature == 0:
        return int(logits.eq(best).nonzero()[0])
    weights = ((logits - best) / temperature).exp()
    least = best.new_tensor(-torch.inf)
    # Of the ties at the k-th place, top-p counts only as many as fit into top-k.
    counted, _ = logits.sort(descending=True)
    if 0 < top_k < len(logits):
        counted = counted[:top_k]
        least = counted[-1]
    if min_p > 0:
        least = torch.maximum(least, best + temperature * torch.tensor(min_p).double().log())
        counted = counted[counted >= least]
    if top_p < 1:
        masses = ((counted - best) / temperature).exp()
        before = masses.cumsum(0) - masses
        likelier = torch.searchsorted(-counted, -counted)  # of equals, none is counted
        is_kept = before[likelier] < top_p * masses.sum()
        is_kept[0] = True
        least = torch.maximum(least, counted[is_kept][-1])
    seeds, positions = logits.new_tensor([[seed], [position]], dtype=torch.int64)
    times = exponentials(seeds, positions, len(logits))[0] / weights
    return int(times.masked_fill(logits < least, torch.inf).argmin())


_MASK = (1 << 32) - 1


def exponentials(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Return exponentially distributed numbers `[n, vocab]` in fp64, keyed by seeds and positions.

    seeds: int64 `[n]`; positions: integers `[n]`. SplitMix64's finalizer (Steele et al., 2014) of
    seed + (position + 1) * 0x9E3779B97F4A7C15 has two halves of 32 bits, low and high. For each
    token, a hash of 32 bits (constants: C. Wellons, "Prospecting for hash functions"), modulo 2^32:

        x = token * 0x9E3779B9 + low
        x = (x ^ x >> 16) * 0x21F0AAAD
        x = (x ^ x >> 15 ^ high) * 0xD35A2D97
        x = x ^ x >> 15

    v = x * 2^-32 + 2^-33 in fp32, below 1, and the number is -log(1 - v). It is most precise near
    0, where it decides which token is chosen."""
    x = seeds + (positions.long() + 1) * -7046029254386353131  # 0x9E3779B97F4A7C15
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ _shift_right(x, shift)) * factor  # 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
    x = (x ^ _shift_right(x, 31))[:, None]
    low, high = x & _MASK, _shift_right(x, 32)
    x = torch.arange(vocab, device=seeds.device) * 0x9E3779B9 + low & _MASK
    x = (x ^ x >> 16) * 0x21F0AAAD & _MASK
    x = (x ^ x >> 15 ^ high) * 0xD35A2D97 & _MASK
    x = x ^ x >> 15
    v = (x.float() * 2.0**-32 + 2.0**-33).clamp(max=1 - 2.0**-24)
    return v.double().neg().log1p().neg()


def _shift_right(x: Tensor, count: int) -> Tensor:
    """Shift int64 without sign extension."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def logprobs(logits: Tensor, token_ids: Tensor, k: int) -> Tensor:
    """Return records int32 `[n, 3 + 2k]` (`kernels.logprobs`) of the given tokens."""
    values = logits.double().log_softmax(-1)
    tokens = torch.cat((token_ids.clamp(min=0)[:, None], logits.topk(k, dim=-1).indices), dim=-1)
    rank = (logits > logits.gather(1, tokens[:, :1])).sum(-1) + 1
    bits = values.gather(1, tokens).float().view(torch.int32)
    pairs = torch.stack((tokens.int(), bits), dim=-1).flatten(1)
    return torch.cat((rank[:, None].int(), pairs), dim=-1)


def penalize(
    logits: Tensor,
    rows: Tensor,
    lengths: Tensor,
    floats: Tensor,
    ints: Tensor,
    windows: Tensor,
    token_ids: Tensor,
) -> None:
    """Apply penalties in place: repetition over prompt and output, the others over the output.

    Both count the last `windows` tokens alone, int32 `[num_rows]`."""
    for entry, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        repetition, presence, frequency = floats[row, 3:].tolist()
        first = max(0, length - int(windows[row]))
        tokens = token_ids[row, first:length].tolist()
        output = tokens[max(0, int(ints[row, 2]) - first) :]
        for token in set(tokens):
            logit = float(logits[entry, token])
            logit = logit / repetition if logit > 0 else logit * repetition
            number = output.count(token)
            logits[entry, token] = logit - frequency * number - presence * (number > 0)


def mask_logits(logits: Tensor, index: Tensor, masks: Tensor) -> None:
    """Set logits to -inf if their bit t % 32 of word t // 32 is not set, and past the last word.

    logits: `[n, vocab]`; index: `[m]`, rows of it; masks: int32 `[m, words]`."""
    for entry, words in zip(index.tolist(), masks.tolist(), strict=True):
        for token in range(logits.shape[1]):
            word = words[token // 32] if token // 32 < len(words) else 0
            if not word >> token % 32 & 1:
                logits[entry, token] = -torch.inf


@dataclass(frozen=True)
class SpeechRules:
    """Rules of the next token in transcriptions (Radford et al., arXiv:2212.04356, section 2.3).

    Fields but the last are token ids. Text comes before `end`, timestamps from `first_timestamp`
    on."""

    start: int
    """Prompts that end with it have no rules: they ask for the language. -1 for models that know
    English alone, whose prompts with timestamps end so."""
    end: int
    no_timestamps: int  # prompts that end with it have no timestamps
    first_timestamp: int
    last_initial_timestamp: int  # the latest with which an answer begins
    suppressed: Tensor
    """True for tokens that no answer has, bool `[2, vocab]`; in the second row for those, too, with
    which no answer begins."""

    @classmethod
    def make(
        cls,
        suppressed: Sequence[int],
        first_suppressed: Sequence[int],
        vocab: int,
        device: torch.device,
        **ids: int,
    ) -> "SpeechRules":
        """Return the rules of token ids. `ids`: the fields' values."""
        masks = torch.zeros(2, vocab, dtype=torch.bool)
        masks[:, list(suppressed)] = True
        masks[1, list(first_suppressed)] = True
        return cls(suppressed=masks.to(device), **ids)

    @cached_property
    def ids(self) -> list[Tensor]:
        """Ids of each row of `suppressed`."""
        return [row.nonzero()[:, 0] for row in self.suppressed]


def speech_rules(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    ints: Tensor,
    rules: SpeechRules,
) -> None:
    """Set the logits of tokens that must not follow in a transcription to -inf, in place.

    logits: `[n, vocab]`, rows may be strided; rows, positions: int32 `[n]`, each entry's row of the
    state and the position of the token to be sampled; entries at negative positions are skipped.
    token_ids: int32 `[num_rows, max_len]`; ints: int64 `[num_rows, 3]`, the last is the number of
    prompt tokens. For prompts without <|notimestamps|>: an answer begins with a timestamp;
    timestamps come in pairs, except before the end, and do not decrease, nor is one repeated after
    text; one follows if all of them are together likelier than any other token."""
    own, lengths = rows.long(), positions.long()
    prompts, history = ints[own, 2], token_ids[own]
    prompt_end = history.gather(1, (prompts - 1).clamp(min=0)[:, None])[:, 0]
    has_rules = (lengths >= 0) & (prompt_end != rules.start)
    for live, ids in zip((has_rules, has_rules & (lengths == prompts)), rules.ids, strict=True):
        logits[live.nonzero(), ids] = -torch.inf
    timed = (has_rules & (prompt_end != rules.no_timestamps)).nonzero()[:, 0]
    if len(timed):
        _apply_timestamp_rules(logits, timed, history[timed], prompts[timed], lengths[timed], rules)


def _apply_timestamp_rules(
    logits: Tensor,
    entries: Tensor,
    history: Tensor,
    prompts: Tensor,
    lengths: Tensor,
    rules: SpeechRules,
) -> None:
    """Apply the rules of timestamps to some rows of logits. The others: of these rows alone."""
    first, at = rules.first_timestamp, torch.arange(history.shape[1], device=logits.device)
    is_time = (history >= first) & (at >= prompts[:, None]) & (at < lengths[:, None])
    latest = torch.where(is_time, at, -1).amax(1)
    after_time = (latest >= 0) & (latest == lengths - 1)
    follows_time = is_time.gather(1, (lengths - 2).clamp(min=0)[:, None])[:, 0]
    ends_pair = after_time & ((lengths - prompts < 2) | follows_time)
    opens_pair = after_time & ~ends_pair
    is_first = lengths == prompts

    least = history.gather(1, latest.clamp(min=0)[:, None])[:, 0] + (~opens_pair).int()
    least = torch.where(latest >= 0, least, first)
    most = torch.where(is_first, rules.last_initial_timestamp, logits.shape[1])
    token = torch.arange(first, logits.shape[1], device=logits.device)
    excluded = ends_pair[:, None] | (token < least[:, None]) | (token > most[:, None])
    times = logits[entries, first:].masked_fill(excluded, -torch.inf)
    logits[entries, first:] = times
    logits[entries, rules.no_timestamps] = -torch.inf
    logits[entries[opens_pair], : rules.end] = -torch.inf
    best_text = logits[entries, :first].amax(1).float()
    needs_time = is_first | (times.float().logsumexp(1) > best_text)
    logits[entries[needs_time], :first] = -torch.inf


def rotate_(heads: Tensor, cos_sin: Tensor) -> None:
    """Rotate pairs (i, i + size / 2) of heads, in place, in fp32.

    heads: `[num_tokens, ..., size]`, may be strided; cos_sin: fp32 `[num_tokens, 2, size / 2]`."""
    extra = [1] * (heads.dim() - 2)
    cos, sin = (one.view(len(heads), *extra, -1) for one in cos_sin.unbind(1))
    first, second = heads.float().chunk(2, -1)
    heads.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))


def place_rows(x: Tensor, table: Tensor, index: Tensor, column: int, *, adds: bool) -> None:
    """Set rows of x `[num_tokens, size]` to a part of a table's rows, or add it, in place.

    table: `[num_rows, width]`, from `column` on; index: int32 `[num_tokens]`, a row of the table,
    or -1: x keeps its row."""
    which = index >= 0
    rows = table[index[which].long(), column : column + x.shape[1]]
    x[which] = x[which] + rows if adds else rows


def attend_segments(qkv: Tensor, cos_sin: Tensor | None, starts: Tensor) -> Tensor:
    """Return attention `[num_tokens, num_heads, size]` from each token to all of its segment.

    qkv: `[num_tokens, 3, num_heads, size]`, its queries and keys rotated first (`rotate_`);
    starts: `[num_segments + 1]`. Scores are scaled by size ** -0.5."""
    out = torch.empty_like(qkv[:, 0])
    both = qkv.float()
    if cos_sin is not None:
        rotate_(both[:, :2], cos_sin)
    for begin, end in pairwise(starts.tolist()):
        q, k, v = both[begin:end].permute(1, 2, 0, 3)
        scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
        out[begin:end] = (scores.softmax(-1) @ v).transpose(0, 1).to(out.dtype)
    return out


def expand_inputs(
    rows: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    token_ids: Tensor,
    block_table: Tensor,
    block_size: int,
    out: tuple[Tensor, Tensor, Tensor],
    adapters: tuple[Tensor, Tensor] | None = None,
    ahead: int = 0,
    shifts: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write (token ids, positions, cache slots), each `[num_tokens]`, of a step's packed tokens.

    rows, seq_lens: `[num_reqs]`, each request's row in the state and its length with this step's
    tokens, its last ones; query_start_loc: `[num_reqs + 1]`; token_ids: `[num_rows, max_len]`;
    block_table: `[num_rows, max_blocks]`. Tokens past the last request are padding: id 0, position
    0, slot -1. adapters: `[num_reqs]`, copied to their tokens `[num_tokens]`; padding has -1.
    ahead: the ids are those of the tokens so many positions later. shifts: `[num_rows]`, added to
    the positions of their tokens `[num_tokens]`; padding has 0."""
    ids, positions, slots = out
    if adapters is not None:
        adapters[1].fill_(-1)
    if shifts is not None:
        shifts[1].fill_(0)
    for x, padding in ((ids, 0), (positions, 0), (slots, -1)):
        x.fill_(padding)
    bounds = query_start_loc.tolist()
    for request, (row, seq_len) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
        begin, end = bounds[request], bounds[request + 1]
        if adapters is not None:
            adapters[1][begin:end] = adapters[0][request]
        position = torch.arange(seq_len - (end - begin), seq_len, device=token_ids.device)
        if shifts is not None:
            shifts[1][begin:end] = position + shifts[0][row]
        ids[begin:end] = token_ids[row, position + ahead]
        positions[begin:end] = position
        slots[begin:end] = (
            block_table[row, position // block_size].long() * block_size + position % block_size
        )


def copy_runs(target: Tensor, runs: Tensor, values: Tensor, longest: int) -> None:
    """Copy runs of `values` into rows of `target` `[num_rows, width]`, in place.

    runs: `[num_runs, 4]`, each (row, column, offset in `values`, length), none longer than
    `longest`."""
    for row, column, begin, length in runs.tolist():
        target[row, column : column + length] = values[begin : begin + length]
