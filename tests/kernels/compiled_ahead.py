"""Compile the kernels that functions launch, without launching them, for a fake GPU.

This is a script because Triton does not compile in a process that interprets.
"""

from __future__ import annotations

import threading

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from toolkit.kernels.reference import Norm
from toolkit.kernels.triton import norm
from toolkit.kernels.triton.ahead import LateCompilations, compiled_side_by_side

compilers: list[int] = []  # the thread of each compilation
loaded: list[str] = []
launched: list[int] = []  # the number of programs of each launch
here = threading.local()
launching = threading.get_ident()


class FakeGPU:
    """The part of a driver that Triton uses."""

    def get_current_device(self) -> int:
        return getattr(here, "device", 0)

    def set_current_device(self, device: int) -> None:
        here.device = device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def utils(self) -> FakeGPU:
        return self

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, ...]:
        assert device == 3, "loaded onto a device that is not the launching thread's"
        if name == "unloadable_kernel" and threading.get_ident() != launching:
            raise MemoryError
        loaded.append(name)
        return 1, 1, 32, 0, 1024

    def launcher_cls(self, source: object, metadata: object):
        return lambda programs, *rest: launched.append(programs)


@triton.jit
def broken_kernel(out_ptr, WIDTH: tl.constexpr):
    tl.static_assert(WIDTH < 8, "too wide")
    tl.store(out_ptr + tl.arange(0, WIDTH), 1.0)


@triton.jit
def unloadable_kernel(out_ptr):
    tl.store(out_ptr, 1.0)


RMS = Norm(torch.ones(256), None, 1e-5, False)
LAYER = Norm(torch.ones(512), torch.ones(512), 1e-5, True)


def launch_norms(*num_tokens: int) -> None:
    for n in num_tokens:
        norm.join(torch.ones(n, 256), torch.ones(n, 256), [RMS])
        norm.join(torch.ones(n, 512), None, [LAYER])


triton.runtime.driver.set_active(FakeGPU())
triton.knobs.compilation.listener = lambda **_: compilers.append(threading.get_ident())
here.device = 3

with compiled_side_by_side(2):
    launch_norms(2, 5, 2)
    other = threading.Thread(
        target=lambda: setattr(here, "device", 3) or broken_kernel[(7,)](torch.zeros(8), WIDTH=4)
    )
    other.start()
    other.join()
    assert launched == [7], "other threads launch as usual"
    launched.clear()
    broken_kernel[(1,)](torch.zeros(8), WIDTH=8)
assert len(compilers) == 3, "each kernel is compiled once"
assert threading.get_ident() not in compilers
assert len(loaded) == 3
assert not launched, "no kernel runs"

launch_norms(2, 5)
assert launched == [2, 2, 5, 5]
assert len(compilers) == len(loaded) == 3, "compiled kernels are not compiled again"

with pytest.raises(triton.CompilationError, match="too wide"):
    broken_kernel[(1,)](torch.zeros(8), WIDTH=8)

with compiled_side_by_side(2):
    unloadable_kernel[(1,)](torch.zeros(1))
unloadable_kernel[(9,)](torch.zeros(1))
assert launched[-1] == 9, "a kernel that could not be loaded is tried again"


def interrupted(futures: object) -> None:
    raise KeyboardInterrupt


with pytest.MonkeyPatch.context() as patch:
    patch.setattr("triton.runtime._async_compile.as_completed", interrupted)
    compiling = compiled_side_by_side(2)
    compiling.__enter__()
    norm.join(torch.ones(4, 512), torch.ones(4, 512), [LAYER])
    with pytest.raises(KeyboardInterrupt):
        compiling.__exit__(None, None, None)
norm.join(torch.ones(4, 512), torch.ones(4, 512), [LAYER])
assert launched[-1] == 4, "kernels can be launched after an interruption"

num_compiled = len(compilers)
with compiled_side_by_side(2):
    launch_norms(2)
assert len(compilers) == num_compiled

late = LateCompilations()
launch_norms(2)
assert late.take() == 0
broken_kernel[(1,)](torch.zeros(8), WIDTH=2)
assert (late.take(), late.take()) == (1, 0)
late.stop()
broken_kernel[(1,)](torch.zeros(8), WIDTH=1)
assert late.take() == 0, "another engine starts"
