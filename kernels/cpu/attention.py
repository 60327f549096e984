"""Attention over the paged cache, and the transform of queries, keys and values before it."""

import ctypes

import torch

from toolkit.kernels.cpu.library import FLOAT, POINTER, SIZE, Kernel

MAX_HEAD_SIZE = 256
DTYPES = (torch.float32, torch.bfloat16)

_write = Kernel("tk_write", POINTER, POINTER, POINTER)
_attend = Kernel("tk_attend", POINTER, POINTER, POINTER, SIZE, POINTER)


class _Layer(ctypes.Structure):
    """Mirror of `AttentionLayer` in attention.h."""

    _fields_ = [  # ctypes wants a list
        *((name, POINTER) for name in ("k_cache", "v_cache", "cos_sin", "q_weight", "k_weight")),
        *(
            (name, SIZE)
            for name in ("half", "num_heads", "num_kv_heads", "head_size", "block_size")
        ),
        ("sliding_window", SIZE),
        ("is_bf16", SIZE),
        *((name, FLOAT) for name in ("scale", "soft_cap", "eps")),
    ]


class _Step(ctypes.Structure):
    """Mirror of `AttentionStep` in attention.h."""

    _fields_ = [
        *(
            (name, POINTER)
            for name in ("positions", "slot_mapping", "query_start_loc", "seq_lens", "rows")
        ),
        ("block_table", POINTER),
        *((name, SIZE) for name in ("max_blocks", "num_reqs", "num_tokens")),
    ]


class AttentionStep:
    """A step's tokens and requests, as in `toolkit.attention.AttentionBatch`, for all layers.

    positions, slot_mapping: int64 `[num_tokens]`; query_start_loc `[num_reqs + 1]`, seq_lens and
    rows `[num_reqs]`, block_table `[num_rows, max_blocks]`: int32. Raises ValueError for others."""

    def __init__(
        self,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        rows: torch.Tensor,
        block_table: torch.Tensor,
    ) -> None:
        tensors = (positions, slot_mapping, query_start_loc, seq_lens, rows, block_table)
        self.num_tokens, num_reqs = len(slot_mapping), len(seq_lens)
        if [tensor.dtype for tensor in tensors] != [torch.int64] * 2 + [torch.int32] * 4:
            raise ValueError(
                "a step's tensors must be two of int64, then four of int32, not "
                f"{[t.dtype for t in tensors]}"
            )
        if not all(tensor.is_contiguous() for tensor in tensors):
            raise ValueError("a step's tensors must be contiguous")
        if (len(positions), len(query_start_loc), len(rows)) != (
            self.num_tokens,
            num_reqs + 1,
            num_reqs,
        ):
            raise ValueError(
                f"a step's lengths do not agree: {[len(tensor) for tensor in tensors]}"
            )
        self._tensors = tensors  # keeps them alive: the structure has only their addresses
        self._step = _Step(
            *(tensor.data_ptr() for tensor in tensors),
            block_table.shape[1],
            num_reqs,
            self.num_tokens,
        )
        self.address = ctypes.addressof(self._step)


class Layer:
    """An attention layer over its caches `[num_blocks, block_size, num_kv_heads, head_size]`.

    `cos_sin` `[max_model_len, 2, half]`, `q_weight` and `k_weight` `[head_size]`: see
    `reference.qk_norm_rope_write`. All tensors are in fp32, or all in bfloat16. Raises ValueError
    for others."""

    def __init__(
        self,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        num_heads: int,
        *,
        scale: float,
        sliding_window: int = 0,
        soft_cap: float = 0.0,
        cos_sin: torch.Tensor | None = None,
        q_weight: torch.Tensor | None = None,
        k_weight: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        _, block_size, num_kv_heads, head_size = k_cache.shape
        given = [
            part for part in (k_cache, v_cache, cos_sin, q_weight, k_weight) if part is not None
        ]
        if k_cache.dtype not in DTYPES or any(part.dtype != k_cache.dtype for part in given):
            raise ValueError(
                "a layer's tensors must be all in fp32 or all in bfloat16, not "
                f"{[part.dtype for part in given]}"
            )
        if v_cache.shape != k_cache.shape or not all(part.is_contiguous() for part in given):
            raise ValueError("a layer's tensors must be contiguous, and its caches of one shape")
        if head_size > MAX_HEAD_SIZE or num_heads % num_kv_heads:
            raise ValueError(
                f"{num_heads} heads over {num_kv_heads} KV heads of size {head_size}: the size is "
                f"at most {MAX_HEAD_SIZE}, and the KV heads must divide the heads"
            )
        half = 0 if cos_sin is None else cos_sin.shape[2]
        if 2 * half > head_size:
            raise ValueError(f"heads of size {head_size} cannot rotate {half} pairs")
        self._tensors = given
        self.dtype, self.num_heads, self.head_size = k_cache.dtype, num_heads, head_size
        self.width = (num_heads + 2 * num_kv_heads) * head_size
        addresses = [
            None if part is None else part.data_ptr() for part in (cos_sin, q_weight, k_weight)
        ]
        sizes = (half, num_heads, num_kv_heads, head_size, block_size, sliding_window)
        is_bf16 = self.dtype == torch.bfloat16
        self._layer = _Layer(
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            *addresses,
            *sizes,
            is_bf16,
            scale,
            soft_cap,
            eps,
        )
        self._address = ctypes.addressof(self._layer)

    def write(self, qkv: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """Compute `reference.qk_norm_rope_write`. qkv: `[num_tokens, width]`, changed in place.

        Returns the queries `[num_tokens, num_heads, head_size]`, a view of `qkv`."""
        if (
            qkv.shape != (step.num_tokens, self.width)
            or qkv.dtype != self.dtype
            or not qkv.is_contiguous()
        ):
            raise ValueError(
                f"q | k | v must be [{step.num_tokens}, {self.width}] in {self.dtype}, contiguous, "
                f"not {list(qkv.shape)} in {qkv.dtype}"
            )
        _write.run(self._address, step.address, qkv.data_ptr())
        return qkv.as_strided(
            (step.num_tokens, self.num_heads, self.head_size), (self.width, self.head_size, 1)
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
