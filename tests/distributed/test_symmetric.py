"""Collectives through peer memory, in Triton's interpreter and processes that share files."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from tests.combinations import pairwise
from tests.forked import ForkedProcess
from toolkit.distributed.group import Group
from toolkit.distributed.symmetric import choose_algorithms, open_peer_memory
from toolkit.kernels.reference import Norm

RANKS = 3
PROGRAMS = 4
"""Fewer than on a GPU, so that each adds up several blocks and rows."""
DTYPES = (torch.float32, torch.bfloat16)
SIZES = (1, 3 * 1024 * 4, 17_000)
SHAPES = ((1, 64), (9, 48))
NORMS = ("rms", "rms wide", "layer", "layer biased", "layer biased wide")
"""Kinds of norms. Wide: with parameters in fp32."""
SUMS = pairwise(DTYPES, SIZES, (False, True))
SUMMED_NORMS = pairwise(DTYPES, SHAPES, NORMS)
GATHERED = ((1, 5), (3, 2500))
GATHERED_BYTES = 4 * RANKS * 3 * 2500
CALLS = 2**31 - 12
"""Earlier calls, so that counts wrap around."""


def x_of(rank: int, call: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * call + rank)).to(
        dtype
    )


def norm_of(kind: str, call: int, size: int, dtype: torch.dtype) -> Norm:
    weight, bias = x_of(8, call, 2, size, dtype=torch.float32 if "wide" in kind else dtype)
    return Norm(weight, bias if "biased" in kind else None, 1e-5, "layer" in kind)


def run_rank(rank: int, folder: Path) -> None:
    """Make the calls and save their results, in a process with its own Triton."""
    import os

    os.environ["TRITON_INTERPRET"] = "1"
    from tests import interpreter
    from toolkit.kernels.triton import all_reduce as kernels

    interpreter.install()
    calls = torch.full((2, kernels.MAX_PROGRAMS), CALLS, dtype=torch.int32)
    kernels.MAX_PROGRAMS = PROGRAMS
    buffers = []
    for peer in range(RANKS):
        with (folder / f"buffer{peer}").open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), kernels.buffer_bytes(RANKS))
        buffers.append(torch.frombuffer(mapped, dtype=torch.uint8))
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
    peers = kernels.Peers(rank, RANKS, addresses, calls)
    found, call = [], 0
    for dtype, size, two_shot in SUMS:
        call += 1
        x = x_of(rank, call, size, dtype=dtype)
        found.append(kernels.all_reduce(x, peers, two_shot=two_shot))
    for dtype, shape, kind in SUMMED_NORMS:
        call += 1
        norm = norm_of(kind, call, shape[1], dtype)
        x = x_of(rank, call, *shape, dtype=dtype)
        pushed = kernels.pushed_norm if kernels.fits_push(x) else kernels.all_reduce_norm
        for kernel in (kernels.all_reduce_norm, pushed):
            residual = x_of(9, call, *shape, dtype=dtype)
            found += kernel(x, residual, norm, peers)
    for dtype in DTYPES:
        for shape in GATHERED:
            call += 1
            outs = []
            for peer in range(RANKS):
                with (folder / f"gathered{peer}").open("r+b") as file:
                    mapped = mmap.mmap(file.fileno(), GATHERED_BYTES)
                outs.append(torch.frombuffer(mapped, dtype=dtype))
            out = outs[rank][: RANKS * shape[0] * shape[1]].view(shape[0], -1)
            addresses = torch.tensor([one.data_ptr() for one in outs])
            kernels.all_gather(x_of(rank, call, *shape, dtype=dtype), out, addresses, peers)
            found.append(out.clone())
            # As in a model, a sum precedes the next gather: no rank overwrites unread rows.
            kernels.all_reduce(x_of(rank, 0, 5000, dtype=dtype), peers)
    torch.save(found, folder / f"found{rank}")


def expected() -> list[torch.Tensor]:
    sums, call = [], 0
    for dtype, size, _ in SUMS:
        call += 1
        sums.append(sum(x_of(rank, call, size, dtype=dtype).double() for rank in range(RANKS)))
    for dtype, shape, kind in SUMMED_NORMS:
        call += 1
        x = sum(x_of(rank, call, *shape, dtype=dtype).double() for rank in range(RANKS)).to(dtype)
        total = (x.double() + x_of(9, call, *shape, dtype=dtype).double()).to(dtype).double()
        weight, bias, eps, is_centered = norm_of(kind, call, shape[1], dtype)
        bias = None if bias is None else bias.double()
        if is_centered:
            norm = F.layer_norm(total, weight.shape, weight.double(), bias, eps)
        else:
            norm = F.rms_norm(total, weight.shape, weight.double(), eps)
        sums += [norm, total, norm, total]
    for dtype in DTYPES:
        for shape in GATHERED:
            call += 1
            sums.append(
                torch.cat(
                    [x_of(rank, call, *shape, dtype=dtype) for rank in range(RANKS)], 1
                ).double()
            )
    return sums


@pytest.mark.skipif(sys.platform != "linux", reason="Triton runs on Linux only")
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton interprets only without a GPU")
def test_ranks_have_the_same_sums(fork_server, tmp_path):
    from toolkit.kernels.triton import all_reduce as kernels

    flags = torch.full(
        ((kernels.PUSHED_OFFSET - kernels.FLAGS_OFFSET) // 4,), 2 * CALLS - 2**32, dtype=torch.int32
    )
    size = kernels.buffer_bytes(RANKS)
    pushed = torch.full(((size - kernels.PUSHED_OFFSET) // 8,), CALLS << 32)
    for rank in range(RANKS):
        with (tmp_path / f"buffer{rank}").open("wb") as file:
            file.truncate(size)  # zeros before the flags, which take no space
            file.seek(kernels.FLAGS_OFFSET)
            file.write(flags.numpy().tobytes() + pushed.numpy().tobytes())
        (tmp_path / f"gathered{rank}").write_bytes(bytes(GATHERED_BYTES))
    command = [sys.executable, "-m", "tests.distributed.test_symmetric"]
    ranks = [
        ForkedProcess(
            fork_server, [*command, str(rank), str(tmp_path)], stdin=PIPE, start_new_session=True
        )
        for rank in range(RANKS)
    ]
    assert [rank.wait(120) for rank in ranks] == [0] * RANKS
    first, *others = [torch.load(tmp_path / f"found{rank}") for rank in range(RANKS)]
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    for found, sum_ in zip(first, expected(), strict=True):
        error = (found.double() - sum_).norm() / sum_.norm()
        assert error < (1e-6 if found.dtype == torch.float32 else torch.finfo(torch.bfloat16).eps)


def test_tensors_too_large_for_the_buffers_are_refused():
    from toolkit.kernels.triton import all_reduce as kernels

    peers = kernels.Peers(
        0,
        2,
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(2, kernels.MAX_PROGRAMS, dtype=torch.int32),
    )
    with pytest.raises(ValueError, match="too large for all_reduce"):
        kernels.all_reduce(torch.empty(kernels.MAX_BYTES // 4 + 1), peers)
    with pytest.raises(ValueError, match="do not fill"):
        kernels.all_gather(
            torch.empty(3, 8), torch.empty(3, 15), torch.zeros(2, dtype=torch.int64), peers
        )
    rows = kernels.MAX_PROGRAMS * kernels.SLOT_BYTES // (4 * 1024)
    assert kernels.fits_norm(torch.empty(rows, 1024))
    assert not kernels.fits_norm(torch.empty(rows + 1, 1024))
    assert kernels.fits_push(
        torch.empty(kernels.MAX_PUSHED_ROWS, kernels.MAX_PUSHED_WIDTH, dtype=torch.float16)
    )
    assert not kernels.fits_push(torch.empty(kernels.MAX_PUSHED_ROWS + 1, 64, dtype=torch.float16))
    assert not kernels.fits_push(torch.empty(1, 64))


@pytest.mark.parametrize(
    ("shape", "dtype", "algorithm", "norm"),
    [
        ((1, 1), torch.bfloat16, "pushed", "all_reduce_norm"),  # an odd row cannot be pushed
        ((1, 4096), torch.bfloat16, "pushed", "pushed_norm"),
        ((1, 2048), torch.float32, "pushed", "all_reduce_norm"),
        ((2, 2050), torch.bfloat16, "two-shot", None),
        ((1, 8192), torch.bfloat16, "two-shot", None),
        ((3, 4096), torch.bfloat16, "one-shot", "all_reduce_norm"),
        ((4, 4096), torch.bfloat16, "NCCL", None),
        ((5, 4096), torch.bfloat16, "NCCL", None),
    ],
    ids=str,
)
def test_size_of_a_sum_decides_the_kernel(monkeypatch, shape, dtype, algorithm, norm):
    pytest.importorskip("triton")
    from toolkit.kernels import sums

    limits = ((8192, "pushed"), (16384, "two-shot"), (24576, "one-shot"), (32768, "NCCL"))
    chosen = sums.Sums(SimpleNamespace(size=3), limits)
    for name in ("all_reduce", "all_reduce_norm", "pushed_norm"):
        monkeypatch.setattr(sums.kernels, name, lambda *_, name=name: name)
    x = torch.empty(shape, dtype=dtype)
    assert chosen.algorithm(x.nbytes) == algorithm
    assert chosen.all_reduce(x) == (None if algorithm == "NCCL" else "all_reduce")
    assert chosen.all_reduce_norm(x, x, Norm(x[0], None, 1e-5, False)) == norm
    assert sums.Sums(chosen.peers).all_reduce(x) is None, "before they are timed"


@pytest.mark.parametrize(
    ("size", "rows", "expected"),
    [
        (2, 1, ["NCCL", "pushed", "one-shot"]),
        (3, 1, ["NCCL", "pushed", "one-shot", "two-shot"]),
        (3, 129, ["NCCL", "one-shot", "two-shot"]),
        (3, 2**17, ["NCCL"]),
    ],
)
def test_algorithms_that_fit_are_timed(monkeypatch, size, rows, expected):
    pytest.importorskip("triton")
    from toolkit.kernels import sums

    called = []
    for name in ("all_reduce", "all_reduce_norm", "pushed_norm"):
        monkeypatch.setattr(sums.kernels, name, lambda *_, name=name, **more: called.append(name))
    monkeypatch.setattr(sums, "join", lambda *_: called.append("norm"))
    x = torch.empty(rows, 4096, dtype=torch.bfloat16, device="meta")
    chosen = sums.Sums(SimpleNamespace(size=size))
    calls = chosen.candidates(lambda x: called.append("NCCL"), x, x, x[0])
    assert list(calls) == expected
    for call in calls.values():
        call()
    of = {"NCCL": ["NCCL", "norm"], "pushed": ["pushed_norm"], "one-shot": ["all_reduce_norm"]}
    of["two-shot"] = ["all_reduce", "norm"]
    assert called == [one for name in expected for one in of[name]]


def test_a_group_on_cpus_has_no_peer_memory():
    group = Group(0, 2)
    cpu = torch.device("cpu")
    assert choose_algorithms(open_peer_memory(group, cpu), cpu) is group


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), Path(sys.argv[2]))
