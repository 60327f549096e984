"""Number and conditions of core restarts."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from toolkit.config import EngineConfig
from toolkit.engine.cores import revival
from toolkit.engine.cores.revival import STABLE_AFTER, CoreRestarter
from toolkit.errors import EngineDeadError

LAUNCH = SimpleNamespace(name="the engine", config=EngineConfig(), adapters=())
HUNG = EngineDeadError("It hangs.")


def core(last_message_at: float) -> SimpleNamespace:
    """Return a core with this time of its latest message. It starts at once."""

    async def kill_and_wait() -> None: ...

    async def ready(report: object) -> SimpleNamespace:
        return SimpleNamespace()

    return SimpleNamespace(
        last_message_at=last_message_at,
        startup_seconds=0.0,
        kill_and_wait=kill_and_wait,
        ready=ready,
    )


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revival, "BACK_OFF", (0.0, 0.0, 0.0))


async def count_restarts(restarter: CoreRestarter, max_count: int) -> int:
    for number in range(max_count):
        try:
            await restarter.restart(HUNG)
        except EngineDeadError:
            return number
    return max_count


async def test_a_core_that_hangs_at_once_counts_even_if_detected_late(
    monkeypatch,
):
    now = [1000.0]

    def monotonic() -> float:
        now[0] += 400.0  # passes between any two calls
        return now[0]

    monkeypatch.setattr(revival.time, "monotonic", monotonic)
    monkeypatch.setattr(revival, "CoreClient", lambda launch, startup_timeout: core(now[0]))
    assert await count_restarts(CoreRestarter(LAUNCH, core(now[0])), 10) == len(revival.BACK_OFF)


async def test_a_restart_may_take_longer_than_the_first_start(monkeypatch):
    timeouts: list[float] = []

    def start(launch: object, startup_timeout: float) -> SimpleNamespace:
        timeouts.append(startup_timeout)
        return core(time.monotonic())

    monkeypatch.setattr(revival, "CoreClient", start)
    first = core(time.monotonic())
    first.startup_seconds = 40.0
    await CoreRestarter(LAUNCH, first).restart(HUNG)
    assert timeouts == [LAUNCH.config.parallel.worker_timeout + 3 * 40]


async def test_a_core_that_worked_for_long_is_always_restarted(monkeypatch):
    monkeypatch.setattr(
        revival,
        "CoreClient",
        lambda launch, startup_timeout: core(time.monotonic() + STABLE_AFTER + 1),
    )
    assert (
        await count_restarts(CoreRestarter(LAUNCH, core(time.monotonic() + STABLE_AFTER + 1)), 10)
        == 10
    )


async def test_a_core_that_is_being_replaced_is_not_suspected(monkeypatch):
    """Pings get no answer while its replacement loads."""
    first = core(time.monotonic())
    restarter = CoreRestarter(LAUNCH, first)
    assert first.on_suspicion is not None
    suspected: list[object] = []

    def start(launch: object, startup_timeout: float) -> SimpleNamespace:
        suspected.append(first.on_suspicion)
        return core(time.monotonic())

    monkeypatch.setattr(revival, "CoreClient", start)
    await restarter.restart(HUNG)
    assert suspected == [None]
