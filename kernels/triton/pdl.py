"""Programmatic dependent launch: a kernel starts while the one before it runs (Hopper and later).

A kernel launched with `launch_pdl=True` may start once every program of its predecessor has called
`release` or ended. Before its own `wait` returns, it must not read what an earlier kernel of the
stream writes, nor write what one reads. Constant data, such as weights, may be prefetched.

Every such kernel waits in every program, so the end of one implies the end of all before it. Data
written two kernels ago may therefore be read before `wait` if the kernel ahead releases after its
own `wait`; data written three kernels ago, if the kernel ahead is a product, which follows such a
kernel. `wait` stands before loops, never in one: the compiler may hoist a loop's loads.

In a CUDA graph this hides the launch, about a microsecond per kernel.

Source: CUDA Programming Guide, "Programmatic Dependent Launch and Synchronization"."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def supported(device: torch.device) -> bool:
    """Return the value for PDL and `launch_pdl`. Cached, since each launch needs it."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


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
