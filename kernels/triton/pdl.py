"""Programmatic dependent launch: a kernel starts while the one before it still runs (Hopper and later).

A kernel launched with `launch_pdl=True` may start as soon as every program of its predecessor has called
`release`, or has ended. Until its own `wait` returns, nothing that any earlier kernel of the stream writes may be
read, and nothing that one reads may be written; what never changes, such as weights, may be fetched. The order
holds over any number of kernels only because every kernel launched so waits in every program: its end then
implies the end of all before it. So what was written two kernels ago may be read before `wait` if the kernel ahead
releases after its own `wait`, and what was written three ago if that is a product, which follows such a kernel. A
`wait` stands before loops, never in one: the compiler may move a loop's loads up.
In a CUDA graph this hides the launch, about a microsecond for each kernel.

Source: CUDA Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

# mypy: allow-incomplete-defs
# Triton annotates the constexpr parameters of a kernel and no others.

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def supported(device: torch.device) -> bool:
    """What kernels get as PDL and as `launch_pdl`. (Asked for each launch, so the answer is kept.)"""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def release(PDL: tl.constexpr):
    """Let the next kernel start once all programs of this one have come here, or have ended.

    Right after `wait` is the place for small kernels: what follows them then starts on an idle GPU, and its
    programs spread evenly. Kernels that read a weight call it first of all, or, where a kernel of many programs follows, once they
    have read it (`matmul`): programs that come as others end crowd on some of the multiprocessors.
    """
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """Until the kernels before this one have ended and their writes are visible."""
    if PDL:
        gdc_wait()


@triton.jit
def fetch(pointers):
    """Ask for the 128 bytes around each address, into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
