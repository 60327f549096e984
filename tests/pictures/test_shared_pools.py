"""A zygote and its workers that the pools of several processes share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.pictures.running import PICTURE, children_of, living
from tests.pictures.samples import QWEN
from tests.server import until
from toolkit.errors import EngineError, InvalidRequestError, ServerUnavailableError
from toolkit.pictures.pool import PicturePool
from toolkit.pictures.settings import PictureLimits, ProcessorSettings
from toolkit.zygote import keeper
from toolkit.zygote.keeper import KeeperServer

ROOT = Path(__file__).parents[2]
Start = Callable[..., PicturePool]

CLIENT = """
import sys, time
from tests.pictures.running import PICTURE
from tests.pictures.samples import QWEN
from toolkit.pictures.pool import PicturePool
from toolkit.pictures.settings import PictureLimits
pool = PicturePool(QWEN, PictureLimits(timeout=float(sys.argv[2])), sys.argv[1])
pool.start()
pool.wait_ready()
futures = [pool.process(PICTURE, "here") for _ in range(4)]
while sum(one.running() for one in futures) < 2:
    time.sleep(0.01)
print("busy", flush=True)
time.sleep(60)
"""
"""A process whose pictures are in flight."""

SERVER = """
import sys, time
from tests.pictures.samples import QWEN
from toolkit.zygote.keeper import KeeperServer
from toolkit.pictures.pool import PicturePool
from toolkit.pictures.settings import PictureLimits
server = KeeperServer(sys.argv[1])
pool = PicturePool(QWEN, PictureLimits(), sys.argv[1])
pool.start()
pool.wait_ready()
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def path(tmp_path: Path, light_path: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Socket of a server whose zygotes have a light image processor."""
    monkeypatch.setenv("PYTHONPATH", light_path)
    server = KeeperServer(str(tmp_path / "pictures"))
    yield str(tmp_path / "pictures")
    server.close()
    assert zygotes() == []


@pytest.fixture
def start(path: str) -> Iterator[Start]:
    """Return a function that starts one of the pools."""
    pools = []

    def start_pool(settings: ProcessorSettings = QWEN, **limits: object) -> PicturePool:
        pools.append(PicturePool(settings, PictureLimits(**limits), path))
        pools[-1].start()
        return pools[-1]

    yield start_pool
    for one in pools:
        one.close()


@pytest.fixture
def pools(start: Start) -> list[PicturePool]:
    return [start(), start()]


def zygotes(parent: int | None = None) -> list[psutil.Process]:
    """Return the zygotes of a process, of this one by default, with a light image processor."""
    children = living(psutil.Process(parent).children())
    found = [one for one in children if "toolkit.zygote.process" in one.cmdline()]
    return [one for one in found if "/light" in one.environ().get("PYTHONPATH", "")]


def workers_of(pools: list[PicturePool]) -> list[psutil.Process]:
    """Return the workers, when all pools are connected."""
    for one in pools:
        one.wait_ready()
    (zygote,) = zygotes()
    return children_of(zygote)


def stop_workers(pools: list[PicturePool]) -> list[psutil.Process]:
    workers = workers_of(pools)
    for one in workers:
        one.suspend()
    return workers


def resume(workers: list[psutil.Process]) -> None:
    for one in living(workers):
        one.resume()


def submit(pools: list[PicturePool]) -> list[Future]:
    """Submit four pictures to each pool, and wait until two of them have a worker."""
    futures = [one.process(PICTURE, f"picture {n}") for n in range(4) for one in pools]
    until(lambda: sum(one.running() for one in futures) == 2)
    return futures


def test_pools_share_a_zygote_and_its_workers(pools: list[PicturePool]) -> None:
    workers = workers_of(pools)
    futures = [one.process(PICTURE, "here") for _ in range(20) for one in pools]
    assert len({one.result(30).data for one in futures}) == 1
    assert [one.measure(PICTURE, "here").result(30) for one in pools] == [(80, 60)] * 2
    assert workers_of(pools) == workers


def test_other_settings_have_another_zygote(start: Start) -> None:
    for one in (start(), start(), start(max_pixels=1_000_000)):
        one.wait_ready()
    assert len(zygotes()) == 2


def test_sizes_come_before_pictures_of_other_pools(start: Start) -> None:
    pools = [start(), start(), start()]
    order: list[Future] = []
    workers = stop_workers(pools)
    futures = submit(pools[:1])
    futures += [one.process(PICTURE, "here") for _ in range(2) for one in pools[1:]]
    time.sleep(1.0)  # until all wait for a worker: nothing shows when the zygote has their requests
    size = pools[0].measure(PICTURE, "here")
    for one in [*futures, size]:
        one.add_done_callback(order.append)
    time.sleep(1.0)
    resume(workers[:1])  # with two, results could overtake each other
    until(lambda: size in order)
    assert order.index(size) < 3
    resume(workers)
    wait(futures, 30)


def test_killed_worker_fails_one_picture_of_one_pool(pools: list[PicturePool]) -> None:
    workers = stop_workers(pools)
    futures = submit(pools)
    workers[0].kill()
    resume(workers)
    wait(futures, 30)
    (error,) = [one.exception() for one in futures if one.exception()]
    assert isinstance(error, InvalidRequestError)
    assert "the process that decoded it was ended by SIGKILL" in error.message
    assert workers[0].pid not in {one.pid for one in workers_of(pools)}


def test_dead_zygote_is_replaced_for_all_pools(pools: list[PicturePool]) -> None:
    stop_workers(pools)
    futures = submit(pools)
    (old,) = zygotes()
    old.kill()
    assert all(one.result(30) for one in futures)
    (new,) = zygotes()
    assert new.pid != old.pid
    assert len(children_of(new)) == 2


def test_zygote_is_not_started_for_ever_for_pools(
    pools: list[PicturePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "START_WINDOW", 0.0)
    for _ in range(keeper.MAX_STARTS):
        workers = workers_of(pools)
        zygotes()[0].kill()
        until(lambda: not living(workers))  # noqa: B023  (called at once)
        assert all(one.process(PICTURE, "here").result(30) for one in pools)
    monkeypatch.setattr(keeper, "START_WINDOW", 600.0)
    zygotes()[0].kill()
    for one in pools:
        with pytest.raises(ServerUnavailableError, match="ended 4 times within 10 minutes"):
            one.process(PICTURE, "here").result(30)


def test_zygote_that_hangs_is_replaced(
    pools: list[PicturePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "ANSWER_TIMEOUT", 0.5)
    monkeypatch.setattr("toolkit.zygote.lender.ANSWER_TIMEOUT", 0.5)
    workers_of(pools)
    (old,) = zygotes()
    old.suspend()
    assert all(one.process(PICTURE, "here").result(30) for one in pools)
    assert old not in zygotes()


def test_processor_that_cannot_be_made_fails_all_pools(start: Start) -> None:
    settings = msgspec.structs.replace(QWEN, fields=QWEN.fields | {"size": {"sides": 3}})
    for one in (start(settings), start(settings)):
        with pytest.raises(EngineError, match="cannot be used: ValueError: the size has sides"):
            one.wait_ready()
        assert isinstance(one.process(PICTURE, "here").exception(30), EngineError)


def test_closed_pool_leaves_the_workers_to_others(pools: list[PicturePool]) -> None:
    old = stop_workers(pools)
    lost = submit(pools[:1])
    kept = [pools[1].process(PICTURE, "here") for _ in range(4)]
    pools[0].close()
    assert all(isinstance(one.exception(0), ServerUnavailableError) for one in lost)
    assert all(one.result(30) for one in kept)
    until(lambda: not living(old))
    assert len(workers_of(pools[1:])) == 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_process_leaves_the_workers_to_others(
    number: signal.Signals, path: str, start: Start
) -> None:
    """A process that is stopped loses its workers, too: they are not returned in time."""
    pool = start(timeout=0.5)
    old = stop_workers([pool])
    command = [sys.executable, "-c", CLIENT, path, "0.5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "busy\n"
        client.send_signal(number)
        future = pool.process(PICTURE, "here")
        assert future.result(30)
        until(lambda: not living(old))
        assert len(workers_of([pool])) == 2
        client.kill()


def test_no_process_outlives_the_keeper(tmp_path: Path, light_path: str) -> None:
    command = [sys.executable, "-c", SERVER, str(tmp_path / "pictures")]
    environment = os.environ | {"PYTHONPATH": light_path}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, cwd=ROOT, env=environment, text=True
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        (zygote,) = zygotes(server.pid)
        family = [zygote, *children_of(zygote)]
        for one in family[1:]:
            one.suspend()
        server.kill()
    until(lambda: not living(family), 20)
