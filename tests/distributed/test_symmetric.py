"""Sums through memory that ranks read of each other: the kernels, in Triton's interpreter, over processes that share files."""

from __future__ import annotations

import mmap
import multiprocessing
import sys
from pathlib import Path

import pytest
import torch

from toolkit.distributed.group import Group
from toolkit.distributed.symmetric import Symmetric, opened, timed

RANKS = 3
PROGRAMS = 4
"""Fewer than a GPU runs: each of them then has several blocks and rows to add up."""
SIZES = (1, 5000, 3 * 1024 * 4, 40_000)
SHAPES = ((1, 64), (9, 48))
DTYPES = (torch.float32, torch.bfloat16)
GATHERED = ((1, 5), (7, 2500))
ROOM = 4 * RANKS * 7 * 2500
"""Bytes of what is gathered."""
CALLS = 2**31 - 12
"""That have been before: counts wrap around."""


def x_of(rank: int, call: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * call + rank)).to(
        dtype
    )


def run_rank(rank: int, folder: Path) -> None:
    """Makes the calls, and leaves what they gave. A process of its own, which has Triton to itself."""
    import os

    os.environ["TRITON_INTERPRET"] = "1"
    from toolkit.kernels.triton import all_reduce as kernels

    calls = torch.full((2, kernels.PROGRAMS), CALLS, dtype=torch.int32)
    kernels.PROGRAMS = PROGRAMS
    buffers = []
    for peer in range(RANKS):
        with (folder / f"buffer{peer}").open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), kernels.buffer_bytes(RANKS))
        buffers.append(torch.frombuffer(mapped, dtype=torch.uint8))
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
    peers = kernels.Peers(rank, RANKS, addresses, calls)
    found, call = [], 0
    for dtype in DTYPES:
        for size in SIZES:
            for two_shot in (False, True):
                call += 1
                found.append(
                    kernels.all_reduce(
                        x_of(rank, call, size, dtype=dtype), peers, two_shot=two_shot
                    )
                )
        for shape in SHAPES:
            for centered in (False, True):
                call += 1
                residual, weight, bias = (
                    x_of(9, call, *shape, dtype=dtype),
                    *x_of(8, call, 2, shape[1], dtype=dtype),
                )
                x = x_of(rank, call, *shape, dtype=dtype)
                found += kernels.all_reduce_norm(
                    x, residual, weight, bias if centered else None, 1e-5, peers
                )
                residual = x_of(9, call, *shape, dtype=dtype)
                ways = kernels.pushed_norm if kernels.fits_push(x) else kernels.all_reduce_norm
                found += ways(x, residual, weight, bias if centered else None, 1e-5, peers)
        for shape in GATHERED:
            call += 1
            outs = []
            for peer in range(RANKS):
                with (folder / f"room{peer}").open("r+b") as file:
                    outs.append(torch.frombuffer(mmap.mmap(file.fileno(), ROOM), dtype=dtype))
            out = outs[rank][: RANKS * shape[0] * shape[1]].view(shape[0], -1)
            at = torch.tensor([room.data_ptr() for room in outs])
            kernels.all_gather(x_of(rank, call, *shape, dtype=dtype), out, at, peers)
            found.append(out.clone())
            # As sums come between a model's gathered logits, so that nobody writes the next ones before these are read.
            kernels.all_reduce(x_of(rank, 0, 5000, dtype=dtype), peers)
    torch.save(found, folder / f"found{rank}")


def expected() -> list[torch.Tensor]:
    sums, call = [], 0
    for dtype in DTYPES:
        for size in SIZES:
            for _ in range(2):
                call += 1
                sums.append(
                    sum(x_of(rank, call, size, dtype=dtype).double() for rank in range(RANKS))
                )
        for shape in SHAPES:
            for centered in (False, True):
                call += 1
                x = sum(x_of(rank, call, *shape, dtype=dtype).double() for rank in range(RANKS)).to(
                    dtype
                )
                total = (
                    (x.double() + x_of(9, call, *shape, dtype=dtype).double()).to(dtype).double()
                )
                weight, bias = x_of(8, call, 2, shape[1], dtype=dtype).double()
                size = (shape[1],)
                layer = torch.nn.functional.layer_norm(total, size, weight, bias)
                norm = (
                    layer if centered else torch.nn.functional.rms_norm(total, size, weight, 1e-5)
                )
                sums += [norm, total, norm, total]
        for shape in GATHERED:
            call += 1
            sums.append(
                torch.cat(
                    [x_of(rank, call, *shape, dtype=dtype) for rank in range(RANKS)], 1
                ).double()
            )
    return sums


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is there on Linux alone")
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU"
)
def test_every_rank_gets_the_same_sums(tmp_path):
    from toolkit.kernels.triton import all_reduce as kernels

    for rank in range(RANKS):
        buffer = torch.zeros(kernels.buffer_bytes(RANKS), dtype=torch.uint8)
        buffer[kernels.FLAGS_AT : kernels.PUSHED_AT].view(torch.int32).fill_(2 * CALLS - 2**32)
        buffer[kernels.PUSHED_AT :].view(torch.int64).fill_(CALLS << 32)
        (tmp_path / f"buffer{rank}").write_bytes(buffer.numpy().tobytes())
        (tmp_path / f"room{rank}").write_bytes(bytes(ROOM))
    processes = multiprocessing.get_context("spawn")
    ranks = [
        processes.Process(target=run_rank, args=(rank, tmp_path), daemon=True)
        for rank in range(RANKS)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
        assert rank.exitcode == 0
    first, *others = [torch.load(tmp_path / f"found{rank}") for rank in range(RANKS)]
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    for found, sum_ in zip(first, expected(), strict=True):
        error = (found.double() - sum_).norm() / sum_.norm()
        assert error < (1e-6 if found.dtype == torch.float32 else torch.finfo(torch.bfloat16).eps)


def test_what_is_too_long_for_the_buffers_is_refused():
    from toolkit.kernels.triton import all_reduce as kernels

    peers = kernels.Peers(
        0, 2, torch.zeros(2, dtype=torch.int64), torch.zeros(2, kernels.PROGRAMS, dtype=torch.int32)
    )
    with pytest.raises(ValueError, match="more than all_reduce sums up"):
        kernels.all_reduce(torch.empty(kernels.MOST_BYTES // 4 + 1), peers)
    with pytest.raises(ValueError, match="do not fill"):
        kernels.all_gather(
            torch.empty(3, 8), torch.empty(3, 15), torch.zeros(2, dtype=torch.int64), peers
        )
    rows = kernels.PROGRAMS * kernels.PLACE // (4 * 1024)
    assert kernels.fits_norm(torch.empty(rows, 1024))
    assert not kernels.fits_norm(torch.empty(rows + 1, 1024))
    assert kernels.fits_push(
        torch.empty(kernels.PUSHED_ROWS, kernels.PUSHED_WIDTH, dtype=torch.float16)
    )
    assert not kernels.fits_push(torch.empty(kernels.PUSHED_ROWS + 1, 64, dtype=torch.float16))
    assert not kernels.fits_push(torch.empty(1, 64))


def test_the_way_goes_by_the_size():
    ways = ((8192, "pushed"), (16384, "two-shot"), (32768, "NCCL"))
    symmetric = Symmetric(None, kernels=None, buffer=torch.empty(0), handle=None, ways=ways)
    assert [symmetric.way(size) for size in (1, 8192, 8193, 16384, 16385, 10**9)] == [
        "pushed", "pushed", "two-shot", "two-shot", "NCCL", "NCCL",
    ]  # fmt: skip


def test_a_group_on_cpus_keeps_to_its_collectives():
    group = Group(0, 2)
    assert timed(opened(group, torch.device("cpu")), torch.device("cpu")) is group
