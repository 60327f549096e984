"""How often a core is started again."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from toolkit.config import EngineConfig
from toolkit.engine.cores import revival
from toolkit.engine.cores.revival import STABLE, Reviver
from toolkit.errors import EngineDeadError

LAUNCH = SimpleNamespace(name="the engine", config=EngineConfig())
HUNG = EngineDeadError("It hangs.")


def core(heard_at: float) -> SimpleNamespace:
    """One that was last heard of then, and that starts at once."""

    async def end() -> None: ...

    async def ready(report: object) -> str:
        return "info"

    return SimpleNamespace(heard_at=heard_at, took=0.0, end=end, ready=ready)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revival, "BACK_OFF", (0.0, 0.0, 0.0))


async def starts(reviver: Reviver, most: int) -> int:
    for number in range(most):
        try:
            await reviver.another(HUNG)
        except EngineDeadError:
            return number
    return most


async def test_one_that_hangs_from_its_first_step_is_given_up_however_late_that_is_noticed(
    monkeypatch,
):
    now = [1000.0]

    def monotonic() -> float:
        now[0] += 400.0  # passes between any two looks
        return now[0]

    monkeypatch.setattr(revival.time, "monotonic", monotonic)
    monkeypatch.setattr(revival, "CoreClient", lambda launch, patience: core(now[0]))
    assert await starts(Reviver(LAUNCH, core(now[0])), 10) == len(revival.BACK_OFF)


async def test_one_that_starts_again_has_longer_than_the_first_start_took(monkeypatch):
    given: list[float] = []

    def another(launch: object, patience: float) -> SimpleNamespace:
        given.append(patience)
        return core(time.monotonic())

    monkeypatch.setattr(revival, "CoreClient", another)
    first = core(time.monotonic())
    first.took = 40.0
    await Reviver(LAUNCH, first).another(HUNG)
    assert given == [LAUNCH.config.parallel.worker_timeout + 3 * 40]


async def test_one_that_made_steps_for_long_is_started_again_any_number_of_times(monkeypatch):
    monkeypatch.setattr(
        revival, "CoreClient", lambda launch, patience: core(time.monotonic() + STABLE + 1)
    )
    assert await starts(Reviver(LAUNCH, core(time.monotonic() + STABLE + 1)), 10) == 10
