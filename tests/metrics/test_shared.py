"""Readings that callers share."""

from __future__ import annotations

import asyncio

import pytest

from toolkit.metrics import shared
from toolkit.metrics.shared import SharedReading


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> tuple[SharedReading[int], list[int]]:
    """A reading that counts, and the counts so far. One is saved."""
    monkeypatch.setattr(shared, "INTERVAL", 0.05)
    monkeypatch.setattr(shared, "SAVED", 0.05)
    taken: list[int] = []

    async def read() -> int:
        taken.append(len(taken))
        return taken[-1]

    return SharedReading(read), taken


async def test_calls_share_the_next_reading(readings: tuple[SharedReading[int], list[int]]) -> None:
    reading, taken = readings
    for _ in range(3):
        assert len(set(await asyncio.gather(*(reading.get() for _ in range(4))))) == 1
    assert len(taken) == 3


async def test_many_callers_get_the_last_reading_at_once(
    readings: tuple[SharedReading[int], list[int]],
) -> None:
    reading, _ = readings
    assert set(await asyncio.gather(*(reading.get() for _ in range(50)))) == {0}
    found = await asyncio.gather(*(reading.get() for _ in range(50)))
    assert found == [1] * shared.MAX_WAITING + [0] * (50 - shared.MAX_WAITING)


async def test_a_reading_is_never_from_before_the_call(
    readings: tuple[SharedReading[int], list[int]],
) -> None:
    reading, taken = readings
    for _ in range(4):
        before = len(taken)
        assert await reading.get() == before


async def test_a_caller_that_leaves_cancels_no_other(
    readings: tuple[SharedReading[int], list[int]],
) -> None:
    reading, _ = readings
    leaving, staying = (asyncio.ensure_future(reading.get()) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await staying == 0
