"""Launching late: predictions of a step's end, and the wait of the core's loop for requests."""

from __future__ import annotations

import pytest

from toolkit.engine import pace
from toolkit.engine.cores.core_process import CoreProcess
from toolkit.engine.messages import Stop
from toolkit.engine.pace import LEAD, RISE, Pace


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(pace.time, "monotonic", lambda: now[0])
    return now


def run(paced: Pace, clock: list[float], seconds: float, num_tokens: int = 900) -> None:
    paced.begin(num_tokens, 20)
    clock[0] += seconds
    paced.end()


def test_first_step_of_a_size_gives_no_time_to_spare(clock: list[float]) -> None:
    paced = Pace()
    assert paced.spare_seconds() == 0
    run(paced, clock, 0.02)
    for num_tokens, num_requests in ((64, 64), (900, 900), (500, 20)):
        paced.begin(num_tokens, num_requests)
        assert paced.spare_seconds() == 0
        paced.end()


def test_time_to_spare_ends_before_the_step(clock: list[float]) -> None:
    paced = Pace()
    run(paced, clock, 0.02)
    paced.begin(910, 33)
    assert paced.spare_seconds() == pytest.approx(0.02 - LEAD)
    clock[0] += 0.015
    assert paced.spare_seconds() == pytest.approx(0.005 - LEAD)
    clock[0] += 0.05
    assert paced.spare_seconds() == 0
    paced.end()
    assert paced.spare_seconds() == 0, "no step runs"


def test_pace_follows_shorter_steps_at_once_others_slowly(
    clock: list[float],
) -> None:
    paced = Pace()
    for seconds, expected in ((0.02, 0.02), (0.01, 0.01), (0.02, 0.01 + RISE * 0.01)):
        run(paced, clock, seconds)
        paced.begin(900, 20)
        assert paced.spare_seconds() == pytest.approx(expected - LEAD)


@pytest.mark.parametrize("stops", [False, True])
def test_core_handles_messages_until_the_launch(stops: bool) -> None:
    spare = [0.02, 0.01, 0.0004]
    handled: list[object] = []

    class Inbox:
        def poll(self, milliseconds: int) -> bool:
            assert milliseconds == int(spare.pop(0) * 1000)
            return True

    class Core:
        spare_seconds = property(lambda self: spare[0])

    core = CoreProcess.__new__(CoreProcess)
    core._inbox, core._core = Inbox(), Core()
    core._handle_messages = lambda: (handled.append(Stop), not stops)[1]
    assert core._wait_for_requests() is not stops
    assert len(handled) == (1 if stops else 2)
