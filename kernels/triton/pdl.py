"""Programmatic dependent launch: a kernel starts while the one before it runs (Hopper and later).

A kernel launched with `launch_pdl=True` may start once every program of its predecessor has called
`release` or ended. Before its own `wait` returns, it must not read what an earlier kernel of the
stream writes, nor write what one reads. Constant data, such as weights, may be prefetched.

Every such kernel waits in every program, so the end of one implies the end of all before it. Data
written two kernels ago may therefore be read before `wait` if the kernel ahead releases after its
own `wait`; data written three kernels ago, if the kernel ahead is a product, which follows such a
kernel. `EARLY` lists what each kernel reads before its `wait`. `wait` stands before loops, never in
one: the compiler may hoist a loop's loads.

In a CUDA graph this hides the launch, about a microsecond per kernel. Results do not depend on it.
If they change with TOOLKIT_EARLY_LAUNCH=0 in the environment, which turns it off, a kernel reads
something before it is written.

Source: CUDA Programming Guide, "Programmatic Dependent Launch and Synchronization"."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

import os
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

VARIABLE = "TOOLKIT_EARLY_LAUNCH"


@cache
def supported(device: torch.device) -> bool:
    """Return the value for PDL and `launch_pdl`. Cached, since each launch needs it."""
    if device.type != "cuda" or os.environ.get(VARIABLE) == "0":
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


class Early(NamedTuple):
    """Parameters of a kernel that point to what it reads before its `wait`."""

    constant: tuple[str, ...] = ()  # written while no step runs: weights, adapters, tables
    step: tuple[str, ...] = ()  # written at least three kernels earlier, as inputs of the step are
    recent: tuple[str, ...] = ()
    """Written two kernels earlier or before. The kernel ahead releases after its own `wait`."""
    fetched: tuple[str, ...] = ()
    """Only prefetched into the L2 cache, which always has the newest data: of any age."""
    with_adapters: tuple[str, ...] = ()
    """Read in addition by a product with LoRA adapters, since it waits after its loop: constants,
    inputs of the step, and x. `lora._shrink_kernel` ahead of it releases after its own `wait`."""


_AFFINE = Early(constant=("weight_ptr", "bias_ptr"))

EARLY = {
    "activation._activation_kernel": Early(),
    "activation._add_gated_kernel": Early(),
    "activation._gate_rows_kernel": Early(),
    "activation._soft_cap_kernel": Early(),
    "all_reduce._all_gather_kernel": Early(),
    "all_reduce._all_reduce_kernel": Early(),
    "all_reduce._all_reduce_norm_kernel": _AFFINE,
    "all_reduce._pushed_norm_kernel": _AFFINE,
    "attention_kernels.decode_kernel": Early(
        constant=("q_weight_ptr", "k_weight_ptr"),
        step=(
            "cos_sin_ptr",
            "q_cos_sin_ptr",
            "query_start_ptr",
            "seq_len_ptr",
            "row_ptr",
            "order_ptr",
            "table_ptr",
            "slot_ptr",
        ),
        fetched=("k_ptr", "v_ptr"),
    ),
    "attention_kernels.merge_kernel": Early(step=("query_start_ptr",)),
    "convolution._convolution_step_kernel": Early(),
    "delta_net._delta_step_kernel": Early(
        constant=("kernel_ptr", "decay_ptr", "time_ptr", "norm_ptr"),
        step=(
            "start_ptr",
            "length_ptr",
            "read_ptr",
            "write_ptr",
            "keep_ptr",
            "kept_ptr",
            "state_ptr",
        ),
    ),
    "verify._verify_kernel": Early(),
    "embedding._embed_kernel": Early(),
    "expert_kernels.down_kernel": Early(
        recent=("id_ptr", "table_ptr", "pair_ptr", "share_ptr"), fetched=("weight_ptr",)
    ),
    "expert_kernels.sum_kernel": Early(step=("id_ptr",)),
    "expert_kernels.up_kernel": Early(),
    "expert_vectors.vector_down_kernel": Early(
        constant=("weight_ptr", "scale_ptr", "bias_ptr"), recent=("id_ptr", "share_ptr")
    ),
    "expert_vectors.vector_up_kernel": Early(),
    "fp8._quantize_kernel": Early(),
    "fp8._vector_kernel": Early(
        constant=("weight_ptr", "scale_ptr", "bias_ptr", "row_part_ptr"),
        step=("place_ptr",),
        with_adapters=("x_ptr", "used_ptr", "block_ptr", "up_ptr"),
    ),
    "fp8_matmul._quantize_kernel": Early(),
    "fp8_matmul._split_kernel": Early(),
    "fp8_matmul._rounded_kernel": Early(
        constant=("scale_ptr", "bias_ptr", "row_part_ptr"),
        step=("place_ptr",),
        fetched=("weight_ptr",),
        with_adapters=("weight_ptr", "x_ptr", "x_scale_ptr", "used_ptr", "block_ptr"),
    ),
    "grouped._grouped_kernel": Early(
        constant=("scale_ptr", "offset_ptr", "bias_ptr", "norm_ptr", "row_part_ptr"),
        step=("place_ptr",),
        fetched=("weight_ptr",),
        with_adapters=("weight_ptr", "x_ptr", "used_ptr", "block_ptr"),
    ),
    "linear._vector_kernel": Early(
        constant=("weight_ptr", "bias_ptr", "row_part_ptr"),
        step=("place_ptr",),
        with_adapters=("x_ptr", "used_ptr", "block_ptr", "up_ptr"),
    ),
    "lora._delta_kernel": Early(step=("used_ptr",)),
    "lora._shrink_kernel": Early(
        constant=("block_ptr",), step=("place_ptr", "used_ptr"), fetched=("low_ptr", "up_ptr")
    ),
    "matmul._tile_kernel": Early(
        constant=("scale_ptr", "bias_ptr", "norm_ptr", "row_part_ptr"),
        step=("place_ptr",),
        fetched=("weight_ptr",),
        with_adapters=("weight_ptr", "x_ptr", "used_ptr", "block_ptr"),
    ),
    "norm._join_kernel": Early(
        constant=(
            "weight_ptr",
            "bias_ptr",
            "weight_2_ptr",
            "bias_2_ptr",
            "factor_ptr",
            "post_weight_ptr",
            "post_bias_ptr",
        )
    ),
    "norm._rms_norm_rows_kernel": Early(constant=("weight_ptr",)),
    "rotary._qk_norm_rope_write_kernel": Early(step=("cos_sin_ptr", "q_cos_sin_ptr", "slot_ptr")),
    "routing._arrange_kernel": Early(),
    "routing._route_kernel": Early(constant=("bias_ptr",)),
    "sampling._choose_kernel": Early(),
    "sampling._statistics_kernel": Early(),
    "speech._rules_kernel": Early(),
}
"""By module and kernel: all kernels that are launched early."""


@triton.jit
def release(PDL: tl.constexpr):
    """Let the next kernel start once all programs of this one have called this or ended.

    Small kernels call it right after `wait`: the next kernel then starts on an idle GPU, and its
    programs spread evenly. Kernels that read a weight call it first. If a kernel of many programs
    follows, they call it after reading the weight (`matmul`): programs that start as others end
    crowd on some multiprocessors."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait until the kernels before this one have ended and their writes are visible."""
    if PDL:
        gdc_wait()


@triton.jit
def fetch(pointers):
    """Prefetch the 128 bytes around each address into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
