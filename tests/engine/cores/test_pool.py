"""States of cores, and what a pool's owner hears of them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest
import pytest_asyncio

from toolkit.engine.cores.pool import NEXT, Core, CorePool, CoreState
from toolkit.engine.messages import Pong
from toolkit.errors import EngineDeadError

DIED = EngineDeadError("It died.")
INFO = SimpleNamespace(num_blocks=1)


class ScriptedLink:
    """A core's connection: it has the messages and the errors of the test."""

    def __init__(self) -> None:
        self.arrived: asyncio.Queue[object] = asyncio.Queue()
        self.has_exited = False
        self.ends: list[str] = []

    async def receive(self) -> list[object]:
        if isinstance(message := await self.arrived.get(), Exception):
            raise message
        return [message]

    async def stop(self) -> None:
        self.ends.append("stop")

    def kill(self) -> None:
        self.ends.append("kill")


class Restarter:
    """Has the next link, or the error of the last attempt."""

    def __init__(self) -> None:
        self.outcome: asyncio.Future[ScriptedLink] = asyncio.get_running_loop().create_future()

    async def restart(self, cause: Exception, num_waiting: int) -> tuple[ScriptedLink, object]:
        assert (cause, num_waiting) == (DIED, 7)
        return await self.outcome, INFO

    def close(self) -> None:
        self.is_closed = True


class Owner:
    """Keeps what it hears, in order."""

    def __init__(self) -> None:
        self.heard: list[tuple] = []

    def on_message(self, core: Core, message: object) -> None:
        self.heard.append(("message", core.index))

    def on_failed(self, cores: list[Core]) -> int:
        self.heard.append(("failed", *(core.index for core in cores)))
        return 7

    def on_replaced(self, core: Core) -> None:
        self.heard.append(("replaced", core.index))

    def on_lost(self, core: Core, error: EngineDeadError) -> None:
        self.heard.append(("lost", core.index, error.message))


class Launched:
    """A pool of two cores that this process replaces, without processes."""

    def __init__(self) -> None:
        self.owner = Owner()
        self.pool = CorePool(2, self.owner)
        self.links = [ScriptedLink(), ScriptedLink()]
        self.pool._launches = [object(), object()]
        for index, link in enumerate(self.links):
            core = self.pool.connect(index, link, INFO)
            core.restarter = Restarter()
            self.pool.watch(index)

    def states(self) -> list[str]:
        return [core.state.value for core in self.pool.cores]

    async def settle(self) -> list[tuple]:
        """Let all tasks run as far as they can. Return what the owner has heard since."""
        for _ in range(5):
            await asyncio.sleep(0)
        heard, self.owner.heard = self.owner.heard, []
        return heard


@pytest_asyncio.fixture
async def launched() -> AsyncIterator[Launched]:
    made = Launched()
    yield made
    await made.pool.stop()


@pytest.mark.parametrize(("before", "after"), itertools.product(CoreState, CoreState))
def test_only_listed_transitions_are_possible(before: CoreState, after: CoreState):
    core = Core(0, "the engine", before)
    if after in NEXT[before]:
        core.enter(after)
        assert core.state is after
    else:
        with pytest.raises(RuntimeError, match=f"is {before.value} and cannot be {after.value}"):
            core.enter(after)
        assert core.state is before


async def test_a_core_that_dies_is_replaced(launched: Launched):
    first, core = launched.links[0], launched.pool.cores[0]
    first.arrived.put_nowait(Pong())
    first.arrived.put_nowait(DIED)
    assert await launched.settle() == [("message", 0), ("failed", 0)]
    assert launched.states() == ["failing", "ready"]
    core.restarter.outcome.set_result(second := ScriptedLink())
    assert await launched.settle() == [("replaced", 0)]
    assert (launched.states(), core.link, first.ends) == (["ready", "ready"], second, ["kill"])
    second.arrived.put_nowait(Pong())
    assert await launched.settle() == [("message", 0)]


async def test_cores_that_die_together_fail_together(launched: Launched):
    """The task of the second one finds it failing, and replaces it."""
    launched.links[1].has_exited = True
    launched.links[0].arrived.put_nowait(DIED)
    assert await launched.settle() == [("failed", 0, 1)]
    launched.links[1].arrived.put_nowait(DIED)
    assert await launched.settle() == [("failed",)]
    for core in launched.pool.cores:
        core.restarter.outcome.set_result(ScriptedLink())
    assert await launched.settle() == [("replaced", 0), ("replaced", 1)]


async def test_a_core_that_dies_too_often_is_lost(launched: Launched):
    launched.links[0].arrived.put_nowait(DIED)
    await launched.settle()
    launched.pool.cores[0].restarter.outcome.set_exception(EngineDeadError("Three times."))
    assert await launched.settle() == [("lost", 0, "Three times.")]
    assert launched.states() == ["stopped", "ready"]
    assert launched.pool.cores[0].is_dead
    await launched.pool.stop()
    assert [link.ends for link in launched.links] == [["kill"], ["stop"]]


async def test_without_replacements_a_dead_core_is_lost(launched: Launched):
    launched.pool.cores[0].restarter = None
    launched.links[0].arrived.put_nowait(DIED)
    assert await launched.settle() == [("failed", 0), ("lost", 0, "It died.")]


async def test_stopping_ends_a_replacement_that_starts(launched: Launched):
    launched.links[0].arrived.put_nowait(DIED)
    await launched.settle()
    await launched.pool.stop()
    assert launched.states() == ["stopped", "stopped"]
    assert launched.pool.cores[0].restarter.outcome.cancelled()
    assert all(core.restarter.is_closed for core in launched.pool.cores)
    assert [link.ends for link in launched.links] == [["stop"], ["stop"]]
    await launched.pool.stop()  # nothing more happens
    assert [link.ends for link in launched.links] == [["stop"], ["stop"]]


async def test_cores_that_start_are_killed():
    pool = CorePool(1, Owner())
    pool.cores[0].link = link = ScriptedLink()
    await pool.stop()
    assert (link.ends, pool.cores[0].state) == (["kill"], CoreState.STOPPED)


async def test_links_follow_another_process():
    """The task that reads a link ends with the error: that process reports the rest."""
    owner = Owner()
    pool, first, second = CorePool(2, owner), ScriptedLink(), ScriptedLink()
    pool.connect(0, first, INFO)
    reading = pool.watch(0)
    pool.pause(0, 1)
    assert owner.heard == [("failed", 0)]
    with pytest.raises(asyncio.CancelledError):
        await reading
    pool.replace(0, second, INFO)
    assert (owner.heard[1:], first.ends) == ([("replaced", 0)], ["kill"])
    reading = pool.watch(0)
    second.arrived.put_nowait(DIED)
    with pytest.raises(EngineDeadError, match="It died"):
        await reading
    pool.remove(1, DIED)
    assert owner.heard[2:] == [("lost", 1, "It died.")]
    await pool.stop()
