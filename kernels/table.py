"""The table of GPU kernels, from which the rest of `toolkit` takes them."""

from functools import cache

import torch


class Kernels:
    """Kernels of a GPU, by subject. They are documented where they are defined.

    Attributes of the object instead of its class are looked up without binding, in every layer.
    Triton is imported here, so that CPUs never import it."""

    def __init__(self) -> None:
        from toolkit.kernels import cublas
        from toolkit.kernels.triton import (
            activation,
            ahead,
            all_reduce,
            attention,
            bitmask,
            embedding,
            fp8,
            inputs,
            linear,
            logprobs,
            matmul,
            norm,
            penalties,
            rotary,
            sampling,
        )

        # Products
        self.linear = linear.linear
        self.linear_add_norm = linear.add_norm
        self.fits_linear = linear.fits
        self.row_classes = matmul.ROW_CLASSES
        self.large_linear = cublas.linear
        self.choosing_large_linear = cublas.choosing
        self.min_choice_tokens = cublas.MIN_TOKENS

        # FP8
        self.fp8_linear = fp8.linear
        self.max_fp8_linear_tokens = fp8.TOKENS
        self.quantize_fp8 = fp8.quantize

        # Norms, activation, embedding
        self.add_rms_norm = norm.add_rms_norm
        self.add_layer_norm = norm.add_layer_norm
        self.activation = activation.activation
        self.gated_activation = activation.gated_activation
        self.embed_shard = embedding.embed_shard

        # Attention
        self.qk_norm_rope_write = rotary.qk_norm_rope_write
        self.paged_attention = attention.paged_attention
        self.decode_attention = attention.decode_attention

        # Sampling
        self.penalize = penalties.penalize
        self.mask_logits = bitmask.mask_logits
        self.sample = sampling.sample
        self.logprobs = logprobs.logprobs

        # Batch state
        self.copy_runs = inputs.copy_runs
        self.expand_inputs = inputs.expand_inputs

        # All-reduce
        self.peer_buffer_bytes = all_reduce.buffer_bytes
        self.make_peers = all_reduce.make_peers
        self.release_peers = all_reduce.release_peers
        self.all_reduce = all_reduce.all_reduce
        self.fits_all_reduce = all_reduce.fits
        self.all_reduce_norm = all_reduce.all_reduce_norm
        self.fits_all_reduce_norm = all_reduce.fits_norm
        self.pushed_norm = all_reduce.pushed_norm
        self.fits_pushed_norm = all_reduce.fits_push
        self.all_gather = all_reduce.all_gather

        # Warm-up
        self.compiled_side_by_side = ahead.compiled_side_by_side
        self.late_compilations = ahead.LateCompilations


@cache
def kernels_for(device: torch.device) -> Kernels | None:
    """Return a device's kernels, or None on CPUs and without Triton: PyTorch serves there."""
    if device.type != "cuda":
        return None
    try:
        import triton  # noqa: F401
    except ImportError:
        return None
    return Kernels()
