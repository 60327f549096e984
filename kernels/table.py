"""The table of GPU kernels, from which the rest of `toolkit` takes them."""

from functools import cache

import torch

from toolkit.kernels.switch import kernels_are_off


class Kernels:
    """Kernels of a GPU, by subject. They are documented where they are defined.

    Where several kernels compute the same, the entry chooses one, by sizes and types.
    Attributes of the object instead of its class are looked up without binding, in every layer.
    Triton is imported here, so that CPUs never import it."""

    def __init__(self) -> None:
        from toolkit.kernels import cublas, products, sums
        from toolkit.kernels.triton import activation, ahead, all_reduce, embedding, inputs, norm
        from toolkit.kernels.triton.attention import attention, rotary
        from toolkit.kernels.triton.experts import experts, routing
        from toolkit.kernels.triton.products import grouped_layout, lora, matmul
        from toolkit.kernels.triton.sampling import (
            bitmask,
            drafts,
            logprobs,
            penalties,
            resample,
            sampling,
        )

        # Products
        self.product = products.product
        self.fuses_norm = products.fuses_norm
        self.product_add_norm = products.add_norm
        self.fp8_product = products.fp8_product
        self.fp8_block_product = products.fp8_block_product
        self.grouped_product = products.grouped_product
        self.fuses_grouped_norm = products.fuses_grouped_norm
        self.grouped_add_norm = products.grouped_add_norm
        self.factors = lora.Factors
        self.add_delta = products.add_delta
        self.add_rows = lora.add_rows
        self.rank_block = lora.RANK_BLOCK
        self.empty_groups = grouped_layout.empty
        self.arrange_groups = grouped_layout.arrange
        self.expand_groups = grouped_layout.expand
        self.row_classes = matmul.ROW_CLASSES
        self.more_row_classes = products.MORE_ROW_CLASSES
        self.choosing_products = cublas.choosing
        self.min_choice_tokens = cublas.MIN_TOKENS

        # Experts
        self.route = routing.route
        self.layer_of_experts = experts.Layer

        # Norms, embedding
        self.join = norm.join
        self.rms_norm_rows = norm.rms_norm_rows
        self.soft_cap_ = activation.soft_cap_
        self.embed_shard = embedding.embed_shard

        # Attention
        self.qk_norm_rope_write = rotary.qk_norm_rope_write
        self.paged_attention = attention.paged_attention
        self.decode_attention = attention.decode_attention

        # Sampling
        self.penalize = penalties.penalize
        self.mask_logits = bitmask.mask_logits
        self.sample = sampling.sample
        self.gather_logits = resample.gather_logits
        self.scatter = resample.scatter
        self.logprobs = logprobs.logprobs

        # Batch state
        self.copy_runs = inputs.copy_runs
        self.expand_inputs = inputs.expand_inputs

        # Drafts
        self.locate_points = drafts.locate_points
        self.accept_drafts = drafts.accept_drafts
        self.look_up_drafts = drafts.look_up_drafts
        self.draft_inputs = drafts.draft_inputs

        # All-reduce
        self.peer_buffer_bytes = all_reduce.buffer_bytes
        self.make_peers = all_reduce.make_peers
        self.release_peers = all_reduce.release_peers
        self.sums = sums.Sums
        self.all_gather = all_reduce.all_gather

        # Warm-up
        self.compiled_side_by_side = ahead.compiled_side_by_side
        self.late_compilations = ahead.LateCompilations


def kernels_for(device: torch.device) -> Kernels | None:
    """Return a device's kernels, or None on CPUs and without Triton: PyTorch serves there."""
    return None if device.type != "cuda" or kernels_are_off() else gpu_kernels()


@cache
def gpu_kernels() -> Kernels | None:
    """Return the kernels, or None without Triton."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return None
    return Kernels()
