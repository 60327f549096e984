"""Calls of kernels are recorded and replayed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from typing import NamedTuple

import pytest
import torch

from toolkit.kernels import cpu

if not cpu.available():
    pytest.skip(f"the CPU kernels: {cpu.problem()}", allow_module_level=True)

from toolkit.kernels.cpu.linear import PackedLinear
from toolkit.kernels.cpu.norm import Join
from toolkit.kernels.cpu.program import Program, Recorder, UnrecordableError
from toolkit.kernels.cpu.sampling import sample
from toolkit.kernels.reference import Norm

HIDDEN, INNER = 24, 40


class Layers(NamedTuple):
    """A few layers, as kernels and as plain PyTorch."""

    up: torch.Tensor
    down: torch.Tensor
    packed_up: PackedLinear
    packed_down: PackedLinear
    norm: Join

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            (normed,), _ = self.norm(x, None)
            x = self.packed_down(self.packed_up(normed)[:, :].flatten(1))
        return x

    def expected(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.nn.functional.rms_norm(x, [HIDDEN], eps=1e-5) @ self.up.T @ self.down.T
        return x


@pytest.fixture
def layers() -> Layers:
    torch.manual_seed(0)
    up, down = torch.randn(INNER, HIDDEN), torch.randn(HIDDEN, INNER)
    norm = Join(HIDDEN, [Norm(torch.ones(HIDDEN), None, 1e-5, False)])
    return Layers(up, down, PackedLinear(up), PackedLinear(down), norm)


def recorded(
    recorder: Recorder, layers: Layers, rows: int
) -> tuple[Program, torch.Tensor, torch.Tensor]:
    """Return (program, output, input)."""
    x = torch.randn(rows, HIDDEN)
    program, out = recorder.record(lambda: layers(x))
    return program, out, x


@pytest.mark.parametrize("variant", cpu.variants())
def test_programs_read_their_inputs_when_they_run(layers: Layers, variant: str) -> None:
    with cpu.using(variant):
        program, out, x = recorded(Recorder(), layers, 3)
        torch.testing.assert_close(out, layers.expected(x), atol=1e-4, rtol=1e-4)
        assert len(program) == 9
        for _ in range(3):
            x.copy_(torch.randn(3, HIDDEN))
            program.run()
            torch.testing.assert_close(out, layers.expected(x), atol=1e-4, rtol=1e-4)


def test_programs_of_one_recorder_run_in_any_order(layers: Layers) -> None:
    recorder = Recorder()
    programs = [recorded(recorder, layers, rows) for rows in (1, 3, 2, 3)]
    for index in (0, 1, 2, 3, 1, 0, 3, 2):
        program, out, x = programs[index]
        x.copy_(torch.randn_like(x))
        program.run()
        torch.testing.assert_close(out, layers.expected(x), atol=1e-4, rtol=1e-4)


def test_memory_is_reused_within_and_between_programs(layers: Layers) -> None:
    """Twelve temporary tensors in two sizes need the memory of the two that are alive at once."""
    recorder = Recorder()
    addresses = set()

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = layers.packed_down(layers.packed_up(x))
            addresses.add(x.data_ptr())
        return x

    x = torch.randn(2, HIDDEN)
    first = recorder.record(lambda: chain(x))
    assert len(addresses) == 2
    del first
    recorder.record(lambda: chain(x))
    assert len(addresses) == 2


def test_views_keep_their_memory(layers: Layers) -> None:
    x = torch.randn(2, HIDDEN)

    def with_view() -> tuple[torch.Tensor, torch.Tensor]:
        part = layers.packed_up(x)[1:]  # the complete tensor is freed
        return part, layers.packed_up(torch.empty(2, HIDDEN))

    _, (part, _) = Recorder().record(with_view)
    torch.testing.assert_close(part, (x @ layers.up.T)[1:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + 1,
        lambda x: x.add_(1),
        lambda x: x.T.contiguous(),
        lambda x: x[torch.tensor([0])],
        lambda x: x.to(torch.bfloat16),
        lambda x: torch.zeros_like(x),
    ],
)
def test_operations_without_a_kernel_are_errors(compute, layers: Layers) -> None:
    x = torch.randn(2, HIDDEN)
    with pytest.raises(UnrecordableError):
        Recorder().record(lambda: layers(compute(x)))
    assert torch.equal(layers.packed_up(x), layers.packed_up(x.clone())), "kernels are restored"


def test_kernels_with_too_many_arguments_are_errors() -> None:
    logits, index = torch.randn(1, 9), torch.zeros(1, dtype=torch.int32)
    floats, ints = torch.zeros(1, 6), torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(UnrecordableError, match="tk_sample"):
        Recorder().record(lambda: sample(logits, index, index, floats, ints))


def test_calls_of_other_threads_are_not_recorded(layers: Layers) -> None:
    x, others = torch.randn(2, HIDDEN), []

    def with_another() -> torch.Tensor:
        thread = threading.Thread(target=lambda: others.append(layers(torch.ones(2, HIDDEN))))
        thread.start()
        thread.join()
        return layers(x)

    program, _ = Recorder().record(with_another)
    assert len(program) == 9
    torch.testing.assert_close(
        others[0], layers.expected(torch.ones(2, HIDDEN)), atol=1e-4, rtol=1e-4
    )


@pytest.fixture(scope="module")
def new_process() -> dict[str, bool]:
    """Return what a new process finds, which records a call and then runs one after a fork."""
    code = """
import json, os, sys, torch
from toolkit.kernels import cpu
from toolkit.kernels.cpu.linear import PackedLinear
from toolkit.kernels.cpu.program import Recorder
cpu.set_num_threads(3)
linear = PackedLinear(torch.ones(2000, 64))
Recorder().record(lambda: linear(torch.empty(1, 64)).as_strided((1, 2), (4, 1)))
has_compiler = "torch._dynamo" in sys.modules
linear(torch.ones(1, 64))
child = os.fork()
if child == 0:
    right = cpu.num_threads() == 1 and linear(torch.ones(1, 64)).eq(64).all()
    os._exit(0 if right else 1)
is_right = os.waitpid(child, 0)[1] == 0
print(json.dumps({"has compiler": has_compiler, "fork is right": is_right}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return json.loads(done.stdout)


def test_recording_does_not_load_pytorchs_compiler(new_process: dict[str, bool]) -> None:
    """Compiling would delay the first answer by seconds."""
    assert not new_process["has compiler"]


def test_kernels_run_in_a_forked_process(new_process: dict[str, bool]) -> None:
    """Forked from a new process, because PyTorch's threads of other tests do not survive a fork."""
    assert new_process["fork is right"]
