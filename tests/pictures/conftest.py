"""Pools of workers that the tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.pictures.samples import QWEN
from toolkit.pictures.pool import PicturePool
from toolkit.pictures.settings import PictureLimits


@pytest.fixture(scope="session")
def pool() -> Iterator[PicturePool]:
    """A pool with the default limits. Tests may end its workers."""
    pool = PicturePool(QWEN, PictureLimits())
    pool.start()
    yield pool
    pool.close()


@pytest.fixture
def own_pool() -> Iterator[Callable[..., PicturePool]]:
    """Return a function that starts a pool for one test; its arguments are limits."""
    pools = []

    def start(**limits: object) -> PicturePool:
        pools.append(PicturePool(QWEN, PictureLimits(**limits)))
        pools[-1].start()
        return pools[-1]

    yield start
    for one in pools:
        one.close()
