"""Fixtures of the CPU kernels' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from toolkit.kernels import cpu


@pytest.fixture(params=cpu.variants())
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    """Use each variant of the kernels that this machine can run."""
    with cpu.using(request.param):
        yield request.param


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Use so many threads."""
    before = cpu.num_threads()
    cpu.set_num_threads(request.param)
    yield request.param
    cpu.set_num_threads(before)
