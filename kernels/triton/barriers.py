"""Barriers in shared memory, for kernels in Gluon."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def barriers(N: gl.constexpr, count: gl.constexpr):
    """Return N barriers, of phases that each end with `count` arrivals."""
    found = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(found.index(i), count=count)
    return found
