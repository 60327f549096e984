"""Attention over the paged cache, and the transform of queries, keys and values before it."""

import ctypes

import torch

from toolkit.kernels.cpu.library import FLOAT, POINTER, SIZE, Kernel
from toolkit.kernels.reference import HeadNorm

MAX_HEAD_SIZE = 512
DTYPES = (torch.float32, torch.bfloat16)

_write = Kernel("tk_write", POINTER, POINTER, POINTER, POINTER, POINTER, SIZE)
_attend = Kernel("tk_attend", POINTER, POINTER, POINTER, SIZE, POINTER)


class _Layer(ctypes.Structure):
    """Mirror of `AttentionLayer` in attention.h."""

    _fields_ = [  # ctypes wants a list
        *((name, POINTER) for name in ("k_cache", "v_cache", "q_weight", "k_weight", "sinks")),
        *((name, SIZE) for name in ("q_stride", "k_stride", "norm_is_bf16")),
        *((name, SIZE) for name in ("is_centered", "norm_is_last", "norms_values")),
        *((name, SIZE) for name in ("num_heads", "num_kv_heads", "head_size", "block_size")),
        *((name, SIZE) for name in ("sliding_window", "chunk", "is_bf16")),
        *((name, SIZE) for name in ("block_stride", "row_size")),
        *((name, FLOAT) for name in ("scale", "soft_cap", "eps", "clip")),
    ]


class _Step(ctypes.Structure):
    """Mirror of `AttentionStep` in attention.h."""

    _fields_ = [
        *((name, POINTER) for name in ("slot_mapping", "query_start_loc", "seq_lens")),
        *((name, POINTER) for name in ("rows", "block_table", "last_key")),
        *((name, SIZE) for name in ("table_stride", "num_reqs", "num_tokens")),
    ]


class AttentionStep:
    """A step's tokens and requests, as in `toolkit.attention.AttentionBatch`, for all layers.

    slot_mapping: int64 `[num_tokens]`; query_start_loc `[num_reqs + 1]`, seq_lens and rows
    `[num_reqs]`, block_table `[num_rows, max_blocks]`, last_key `[num_tokens]`: int32. Raises
    ValueError for others."""

    def __init__(
        self,
        slot_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        rows: torch.Tensor,
        block_table: torch.Tensor,
        last_key: torch.Tensor | None = None,
    ) -> None:
        tensors = [slot_mapping, query_start_loc, seq_lens, rows, block_table]
        tensors += [] if last_key is None else [last_key]
        self.num_tokens, num_reqs = len(slot_mapping), len(seq_lens)
        if [t.dtype for t in tensors] != [torch.int64] + [torch.int32] * (len(tensors) - 1):
            raise ValueError(
                "a step's tensors must be one of int64, then others of int32, not "
                f"{[t.dtype for t in tensors]}"
            )
        others = (one for one in tensors if one is not block_table)
        if block_table.stride(1) != 1 or not all(one.is_contiguous() for one in others):
            raise ValueError("a step's tensors must be contiguous, the block table in each row")
        num_keys = self.num_tokens if last_key is None else len(last_key)
        if (len(query_start_loc), len(rows), num_keys) != (num_reqs + 1, num_reqs, self.num_tokens):
            raise ValueError(
                f"a step's lengths do not agree: {[len(tensor) for tensor in tensors]}"
            )
        self._tensors = tensors  # keeps them alive: the structure has only their addresses
        self._step = _Step(
            *(tensor.data_ptr() for tensor in tensors[:5]),
            None if last_key is None else last_key.data_ptr(),
            block_table.stride(0),
            num_reqs,
            self.num_tokens,
        )
        self.address = ctypes.addressof(self._step)


class Layer:
    """An attention layer over its caches `[num_blocks, block_size, num_kv_heads, head_size]`.

    Each block is contiguous; other layers' blocks may lie between them.
    norm, clip: see `reference.qk_norm_rope_write`; other options: `reference.paged_attention`. The
    caches are both in fp32 or both in bfloat16, as are the norm's weights; queries, keys, values
    and angles are in the caches' type. writes: it has keys and values of its own. Raises ValueError
    for others."""

    def __init__(
        self,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        num_heads: int,
        *,
        scale: float,
        sliding_window: int = 0,
        chunk: int = 0,
        soft_cap: float = 0.0,
        sinks: torch.Tensor | None = None,
        norm: HeadNorm | None = None,
        clip: float = 0.0,
        writes: bool = True,
    ) -> None:
        _, block_size, num_kv_heads, head_size = k_cache.shape
        if k_cache.dtype not in DTYPES or v_cache.dtype != k_cache.dtype:
            raise ValueError(
                "a layer's caches must be both in fp32 or both in bfloat16, not "
                f"{k_cache.dtype} and {v_cache.dtype}"
            )
        if (v_cache.shape, v_cache.stride()) != (k_cache.shape, k_cache.stride()) or not k_cache[
            0
        ].is_contiguous():
            raise ValueError("a layer's caches must have contiguous blocks, and be alike")
        if head_size > MAX_HEAD_SIZE or num_heads % num_kv_heads:
            raise ValueError(
                f"{num_heads} heads over {num_kv_heads} KV heads of size {head_size}: the size is "
                f"at most {MAX_HEAD_SIZE}, and the KV heads must divide the heads"
            )
        self.dtype, self.num_heads, self.head_size = k_cache.dtype, num_heads, head_size
        own_kv_heads = num_kv_heads if writes else 0
        self.width = (num_heads + 2 * own_kv_heads) * head_size
        weights = [] if norm is None else [norm.q_weight, norm.k_weight]
        for weight, heads in zip(weights, (num_heads, own_kv_heads or num_heads), strict=False):
            if (
                weight.shape not in ((1, head_size), (heads, head_size))
                or weight.dtype not in DTYPES
                or weight.dtype != weights[0].dtype
                or not weight.is_contiguous()
            ):
                raise ValueError(
                    f"the weight of the norm of {heads} heads must be [1 or {heads}, {head_size}], "
                    "contiguous, both in fp32 or both in bfloat16, not "
                    f"{list(weight.shape)} in {weight.dtype}"
                )
        if sinks is not None and (
            sinks.shape != (num_heads,) or sinks.dtype != torch.float32 or not sinks.is_contiguous()
        ):
            raise ValueError(
                f"the sinks of {num_heads} heads must be [{num_heads}] in fp32, contiguous, not "
                f"{list(sinks.shape)} in {sinks.dtype}"
            )
        # Keeps them alive: the structure has only their addresses.
        self._tensors = (k_cache, v_cache, *(weights or (None, None)), sinks)
        self._layer, self._written = (
            _Layer(
                *(None if tensor is None else tensor.data_ptr() for tensor in self._tensors),
                *([head_size * (len(weight) > 1) for weight in weights] or [0, 0]),
                bool(weights) and weights[0].dtype == torch.bfloat16,
                *(getattr(norm, one, False) for one in ("is_centered", "is_last", "norms_values")),
                *(num_heads, kv_heads, head_size, block_size, sliding_window, chunk),
                *(self.dtype == torch.bfloat16, k_cache.stride(0), self.width),
                *(scale, soft_cap, norm.eps if norm is not None else 0.0, clip),
            )
            for kv_heads in (num_kv_heads, own_kv_heads)
        )
        self._address = ctypes.addressof(self._layer)

    def write(
        self,
        qkv: torch.Tensor,
        step: AttentionStep,
        cos_sin: torch.Tensor | None = None,
        q_cos_sin: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute `reference.qk_norm_rope_write`. qkv: `[num_tokens, width]`, changed in place.

        Rows may be apart, always by as much. Returns the queries `[num_tokens, num_heads,
        head_size]`, a view of `qkv`."""
        if (
            qkv.shape != (step.num_tokens, self.width)
            or qkv.dtype != self.dtype
            or qkv.stride(1) != 1
        ):
            raise ValueError(
                f"q | k | v must be [{step.num_tokens}, {self.width}] in {self.dtype}, each row "
                f"contiguous, not {list(qkv.shape)} in {qkv.dtype}"
            )
        self._written.row_size = row_size = qkv.stride(0)
        half = 0 if cos_sin is None else cos_sin.shape[2]
        for angles in (cos_sin, q_cos_sin):
            if angles is not None and (
                angles.shape != (step.num_tokens, 2, min(half, self.head_size // 2))
                or angles.dtype != self.dtype
                or not angles.is_contiguous()
            ):
                raise ValueError(
                    f"the angles of {step.num_tokens} tokens must be [{step.num_tokens}, 2, at "
                    f"most {self.head_size // 2}] in {self.dtype}, contiguous and of one size, not "
                    f"{list(angles.shape)} in {angles.dtype}"
                )
        keys = None if cos_sin is None else cos_sin.data_ptr()
        queries = keys if q_cos_sin is None else q_cos_sin.data_ptr()
        _write.run(
            ctypes.addressof(self._written), step.address, qkv.data_ptr(), queries, keys, half
        )
        return qkv.as_strided(
            (step.num_tokens, self.num_heads, self.head_size), (row_size, self.head_size, 1)
        )

    def attend(self, q: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """Compute `reference.paged_attention`. There is no padding past the last request.

        q: `[num_tokens, num_heads, head_size]`, strided in its first dimension."""
        if (
            len(q) != step.num_tokens
            or q.dtype != self.dtype
            or q.stride()[1:] != (self.head_size, 1)
        ):
            raise ValueError(
                f"q must have {step.num_tokens} tokens in {self.dtype}, each of contiguous heads"
            )
        out = torch.empty(q.shape, dtype=q.dtype)
        _attend.run(self._address, step.address, q.data_ptr(), q.stride(0), out.data_ptr())
        return out
