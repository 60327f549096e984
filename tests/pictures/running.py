"""Processes of pools, as the system sees them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future

import psutil

from tests.pictures.samples import as_file, gradient, saved
from tests.server import until
from toolkit.pictures.pool import PicturePool

PICTURE = as_file(saved(gradient(80, 60)))


def living(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that have not ended."""
    found = []
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
    return found


def workers_of(pool: PicturePool) -> list[psutil.Process]:
    """Return the workers, when all have started."""
    pool.wait_ready()
    return children_of(psutil.Process(pool.zygote_pid))


def children_of(zygote: psutil.Process) -> list[psutil.Process]:
    """Return two workers, when they have given up what they do not need."""

    def are_ready() -> bool:
        workers = living(zygote.children())
        return len(workers) == 2 and all(one.nice() > zygote.nice() for one in workers)

    until(are_ready)
    return living(zygote.children())


@contextlib.contextmanager
def stopped(pool: PicturePool) -> Iterator[list[psutil.Process]]:
    """Stop the workers meanwhile, so that pictures are in flight."""
    workers = workers_of(pool)
    for one in workers:
        one.suspend()
    try:
        yield workers
    finally:
        for one in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.resume()


def in_flight(pool: PicturePool, count: int) -> list[Future]:
    """Submit pictures, and wait until two workers have one."""
    futures = [pool.process(PICTURE, f"picture {n}") for n in range(count)]
    until(lambda: sum(one.running() for one in futures) == min(count, 2))
    return futures
