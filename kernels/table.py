"""The table of a device's kernels, from which the rest of `toolkit` takes them."""

from collections.abc import Callable
from functools import cache

import torch

from toolkit.kernels import drafts, logprobs, plain, reference
from toolkit.kernels.switch import kernels_are_off


class Kernels:
    """Entries that every device has. Here they are PyTorch's: the reference, or a faster version.

    They are documented in `kernels.reference` and `kernels.drafts`. Attributes of the object
    instead of its class are looked up without binding, in every layer."""

    why_eager: str | None = None
    """Why no step replays a CUDA graph. None: the device has none."""

    def __init__(self) -> None:
        # Experts, norms
        self.route = reference.route
        self.join = reference.join
        self.rms_norm_rows = reference.rms_norm_rows
        self.soft_cap_ = reference.soft_cap_

        # Towers
        self.rotate_ = reference.rotate_
        self.place_rows = reference.place_rows

        # Sampling
        self.penalize = plain.penalize
        self.mask_logits = plain.mask_logits
        self.speech_rules = reference.speech_rules
        self.sample = plain.sample
        self.logprobs = logprobs.logprobs

        # Batch state
        self.copy_runs = reference.copy_runs
        self.expand_inputs = reference.expand_inputs

        # Drafts
        self.locate_points = drafts.locate_points
        self.accept_drafts = drafts.accept_drafts
        self.look_up_drafts = drafts.look_up_drafts
        self.draft_inputs = drafts.draft_inputs

    def ignore_compilations(self) -> None:
        """Stop the count of `count_compilations`, as while another engine of the process starts."""

    def count_compilations(self) -> Callable[[], int]:
        """Count the kernels that are compiled from now on. The result returns those since its last
        call."""
        return lambda: 0


class CPUKernels(Kernels):
    """Entries of CPUs, in C++ and NumPy. Layers prepare products and norms (`kernels.cpu`)."""

    def __init__(self) -> None:
        from toolkit.kernels.cpu import speech, state

        super().__init__()
        self.speech_rules = speech.speech_rules
        self.sample = state.sample
        self.copy_runs = state.copy_runs
        self.expand_inputs = state.expand_inputs
        self.locate_points = state.locate_points
        self.accept_drafts = state.accept_drafts
        self.look_up_drafts = state.look_up_drafts
        self.draft_inputs = state.draft_inputs


class TritonKernels(Kernels):
    """Kernels of a GPU, by subject. They are documented where they are defined.

    Where several kernels compute the same, the entry chooses one, by sizes and types. Triton is
    imported here, so that CPUs never import it."""

    why_eager = "the attention backend or the model's code does not allow it"

    def __init__(self) -> None:
        from toolkit.kernels import cublas, products, sums
        from toolkit.kernels.triton import activation, ahead, all_reduce, embedding, inputs, norm
        from toolkit.kernels.triton.attention import attention, rotary, windows
        from toolkit.kernels.triton.experts import experts, routing
        from toolkit.kernels.triton.products import grouped_layout, lora, matmul
        from toolkit.kernels.triton.recurrent import convolution, delta_net, step
        from toolkit.kernels.triton.sampling import (
            bitmask,
            drafts,
            logprobs,
            penalties,
            resample,
            sampling,
            speech,
        )

        super().__init__()

        # Products
        self.product = products.product
        self.fuses_norm = products.fuses_norm
        self.product_add_norm = products.add_norm
        self.fp8_product = products.fp8_product
        self.rounded_fp8_product = products.rounded_fp8_product
        self.reads_rounded = products.reads_rounded
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
        self.place_rows = embedding.place_rows

        # Attention
        self.qk_norm_rope_write = rotary.qk_norm_rope_write
        self.paged_attention = attention.paged_attention
        self.decode_attention = attention.decode_attention
        self.rotate_ = rotary.rotate_
        self.attend_short = windows.attend_short
        self.max_short_segment = windows.MOST_TOKENS

        self.gate_rows = activation.gate_rows
        self.multiply_rows = activation.multiply_rows
        self.add_gated = activation.add_gated

        # Layers with a state for each request
        self.recurrent_step = step.RecurrentStep
        self.delta_net = delta_net.DeltaNet
        self.gated_convolution = convolution.GatedConvolution

        # Sampling
        self.penalize = self.penalize_in_graph = penalties.penalize
        self.mask_logits = bitmask.mask_logits
        self.speech_rules = speech.speech_rules
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
        self._late_compilations = ahead.LateCompilations

    def ignore_compilations(self) -> None:
        self._late_compilations.stop()

    def count_compilations(self) -> Callable[[], int]:
        return self._late_compilations().take


def kernels_for(device: torch.device) -> Kernels:
    """Return a device's kernels."""
    if kernels_are_off():
        return _plain_kernels(device.type)
    if device.type == "cpu":
        return _cpu_kernels()
    return triton_kernels_for(device) or _plain_kernels(device.type)


def triton_kernels_for(device: torch.device) -> TritonKernels | None:
    """Return a GPU's kernels, or None on CPUs and without Triton."""
    return None if device.type != "cuda" or kernels_are_off() else gpu_kernels()


@cache
def gpu_kernels() -> TritonKernels | None:
    """Return the kernels, or None without Triton."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return None
    return TritonKernels()


@cache
def _cpu_kernels() -> CPUKernels:
    return CPUKernels()


@cache
def _plain_kernels(device_type: str) -> Kernels:
    kernels = Kernels()
    if device_type == "cuda":
        kernels.why_eager = "CUDA graphs need the package triton"
    return kernels
