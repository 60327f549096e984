"""Processes that decode pictures: limits, crashes, and the end of the server."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, wait
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from PIL import Image

from tests.pictures.running import PICTURE, children_of, in_flight, living, stopped, workers_of
from tests.pictures.samples import QWEN, as_file, gradient, saved
from tests.server import until
from toolkit.errors import EngineError, InvalidRequestError, ServerUnavailableError
from toolkit.framing import frame
from toolkit.pictures import pool as pool_module
from toolkit.pictures.messages import Done, Job
from toolkit.pictures.pool import PicturePool
from toolkit.pictures.settings import PictureLimits
from toolkit.pictures.sources import from_image
from toolkit.zygote import keeper, lender
from toolkit.zygote.lender import Worker, WorkerLostError
from toolkit.zygote.messages import Channel, Refused, Take

ROOT = Path(__file__).parents[2]


@pytest.fixture
def pool(light_pool: Callable[..., PicturePool]) -> PicturePool:
    return light_pool()


def test_pictures_are_decoded_from_any_thread(pool: PicturePool) -> None:
    expected = pool.process(PICTURE, "here").result(30)
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(pool.process(PICTURE, "here").result(30)))
        for _ in range(8)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert found == [expected] * 8


async def test_pictures_are_decoded_for_an_event_loop(pool: PicturePool) -> None:
    futures = [asyncio.wrap_future(pool.process(PICTURE, "here")) for _ in range(4)]
    assert len({one.data for one in await asyncio.gather(*futures)}) == 1


def test_pool_does_not_keep_pictures(pool: PicturePool) -> None:
    given = as_file(bytes(PICTURE.data))
    gone = weakref.ref(given)
    assert pool.process(given, "here").result(30)
    del given
    until(lambda: gone() is None, 10)


def test_sizes_are_measured_before_pictures_that_wait(
    pool: PicturePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lender, "KEPT", 0.0)
    sent, order = sent_messages(monkeypatch), []
    with stopped(pool) as workers:
        futures = in_flight(pool, 6)
        measured = [pool.measure(PICTURE, "here") for _ in range(2)]
        for one in [*futures, *measured]:
            one.add_done_callback(order.append)
        until(lambda: sent.count(Take(is_urgent=True)) == 2)
        workers[0].resume()  # alone, so that it takes one task after another
        wait(measured, 30)
    wait(futures, 30)
    assert set(order[1:3]) == set(measured)


def sent_messages(monkeypatch: pytest.MonkeyPatch) -> list[msgspec.Struct]:
    """Return a list of the messages that this process has sent to others from now on."""
    sent: list[msgspec.Struct] = []
    send = Channel.send

    def record(channel: Channel, message: msgspec.Struct, *args: Any, **options: Any) -> None:
        send(channel, message, *args, **options)
        sent.append(message)

    monkeypatch.setattr(Channel, "send", record)
    return sent


def test_killed_worker_fails_only_its_picture(pool: PicturePool) -> None:
    with stopped(pool) as workers:
        futures = in_flight(pool, 6)
        workers[0].kill()
    wait(futures, 30)
    failed = [one for one in futures if one.exception()]
    assert len(failed) == 1
    error = failed[0].exception()
    assert isinstance(error, InvalidRequestError)
    assert error.message == (
        f"picture {futures.index(failed[0])} cannot be decoded: the process that decoded it was "
        "ended by SIGKILL"
    )
    assert workers[0].pid not in {one.pid for one in workers_of(pool)}


def test_idle_worker_that_died_is_replaced(pool: PicturePool) -> None:
    workers = workers_of(pool)
    for one in workers:
        one.kill()
    until(lambda: not living(workers))
    futures = [pool.process(PICTURE, "here") for _ in range(4)]
    assert all(one.result(30) for one in futures)


def test_dead_zygote_is_replaced_and_pictures_decoded(pool: PicturePool) -> None:
    old = workers_of(pool)
    with stopped(pool):
        futures = in_flight(pool, 4)
        os.kill(pool.zygote_pid, signal.SIGKILL)
        assert all(one.result(30) for one in futures)
    assert not {one.pid for one in old} & {one.pid for one in workers_of(pool)}


def test_zygote_is_not_started_for_ever(
    light_pool: Callable[..., PicturePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "MAX_STARTS", 1)
    pool = light_pool()
    workers = workers_of(pool)
    os.kill(pool.zygote_pid, signal.SIGKILL)
    until(lambda: not living(workers))
    with pytest.raises(ServerUnavailableError, match=r"ended 1 times within 10 minutes"):
        pool.process(PICTURE, "here").result(30)
    monkeypatch.setattr(keeper, "START_WINDOW", 0.0)
    assert pool.process(PICTURE, "here").result(30)


@pytest.mark.parametrize(
    ("height", "problem"),
    [
        (10, "cannot be decoded: internal error (KeyError: 'a bug')"),
        (11, "needs more than 397 MiB of memory"),
        (12, "cannot be decoded: the process that decoded it was ended by SIGABRT"),
        (13, "takes longer than 0.7 seconds to decode"),
    ],
)
def test_picture_beyond_a_limit_fails_alone(
    light_pool: Callable[..., PicturePool], height: int, problem: str
) -> None:
    pool = light_pool(timeout=0.7, max_pixels=600_000)
    wrong = as_file(saved(gradient(20, height)))
    futures = [pool.process(one, "here") for one in (PICTURE, wrong, PICTURE, wrong, PICTURE)]
    errors = [one.exception(30) for one in futures]
    assert [error and str(error) for error in errors] == [None, *[f"here {problem}", None] * 2]
    assert all(isinstance(one, InvalidRequestError) for one in errors if one)


def test_worker_that_keeps_memory_is_replaced(pool: PicturePool) -> None:
    before = workers_of(pool)
    assert pool.process(as_file(saved(gradient(20, 15))), "here").result(30)
    assert living(before) == before
    assert pool.process(as_file(saved(gradient(20, 14))), "here").result(30)
    until(lambda: len(living(before)) == 1, 20)
    assert pool.process(PICTURE, "here").result(30)


def test_worker_that_does_not_answer_is_killed(light_pool: Callable[..., PicturePool]) -> None:
    pool = light_pool(timeout=0.5)
    with stopped(pool) as workers:
        errors = [one.exception(30) for one in in_flight(pool, 3)]
        until(lambda: not living(workers))
    problem = "takes longer than 0.5 seconds to decode"
    assert [error and str(error) for error in errors] == [
        f"picture 0 {problem}",
        f"picture 1 {problem}",
        None,
    ]


def test_image_beyond_the_limit_of_pixels_is_refused(
    light_pool: Callable[..., PicturePool],
) -> None:
    pool = light_pool(max_pixels=1_000_000)
    image = from_image(Image.new("RGB", (2000, 600)))
    for future in (pool.process(image, "here"), pool.measure(image, "here")):
        error = future.exception(30)
        assert isinstance(error, InvalidRequestError)
        assert "is a picture of 2000 x 600 pixels; at most 1,000,000" in error.message


def test_cancelled_pictures_leave_the_queue(pool: PicturePool) -> None:
    with stopped(pool):
        futures = in_flight(pool, 2)
        waiting = as_file(bytes(PICTURE.data))
        gone = weakref.ref(waiting)
        future = pool.process(waiting, "here")
        del waiting
        assert future.cancel()
        with pytest.raises(CancelledError):
            future.result()
        assert gone() is None
    assert all(one.result(30) for one in futures)


def test_worker_has_nothing_that_it_does_not_need(
    light_pool: Callable[..., PicturePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_SERVER", "1")
    pool = light_pool()
    worker = workers_of(pool)[0]
    folder = Path(f"/proc/{worker.pid}")
    until(lambda: len(list((folder / "fd").iterdir())) == 4)
    files = [os.readlink(one) for one in sorted((folder / "fd").iterdir())]
    assert files[:3] == ["/dev/null"] * 3
    assert files[3].startswith("socket:")
    assert worker.nice() == min(19, psutil.Process(pool.zygote_pid).nice() + 10)
    of_environment = pool.process(as_file(saved(gradient(20, 16))), "here").result(30).grid
    assert of_environment == (0,)
    assert b"SECRET" not in (folder / "environ").read_bytes()
    assert worker.num_threads() == 1
    limits = {
        kind: resource.prlimit(worker.pid, kind)
        for kind in (
            resource.RLIMIT_CORE,
            resource.RLIMIT_FSIZE,
            resource.RLIMIT_NPROC,
            resource.RLIMIT_AS,
        )
    }
    until(lambda: resource.prlimit(worker.pid, resource.RLIMIT_AS)[1] < 2**32)
    assert limits[resource.RLIMIT_CORE] == limits[resource.RLIMIT_FSIZE] == (0, 0)
    assert limits[resource.RLIMIT_NPROC] == (0, 0)


PARENT = """
import sys, time
from tests.pictures.samples import QWEN
from toolkit.pictures.pool import PicturePool
from toolkit.pictures.settings import PictureLimits
QWEN.fields["size"]["seconds"] = int(sys.argv[1])
pool = PicturePool(QWEN, PictureLimits())
pool.start()
print(pool.zygote_pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("moment", ["import", "ready", "busy"])
def test_no_process_outlives_the_server(moment: str, light_path: str) -> None:
    command = [sys.executable, "-c", PARENT, "60" if moment == "import" else "0"]
    environment = os.environ | {"PYTHONPATH": light_path}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, cwd=ROOT, env=environment, text=True
    ) as server:
        assert server.stdout is not None
        zygote = psutil.Process(int(server.stdout.readline()))
        if moment == "import":
            until(lambda: zygote.num_threads() == 2)  # one waits for the end of the server
        family = [zygote] if moment == "import" else [zygote, *children_of(zygote)]
        if moment == "busy":
            for one in family[1:]:
                one.suspend()
        server.kill()
    until(lambda: not living(family), 20)


def test_close_ends_all_and_fails_what_is_left(light_pool: Callable[..., PicturePool]) -> None:
    pool = light_pool()
    with stopped(pool) as workers:
        futures = in_flight(pool, 4)
        pool.close()
        until(lambda: not living(workers))
    for one in [*futures, pool.process(PICTURE, "here")]:
        assert isinstance(one.exception(0), ServerUnavailableError)
    with pytest.raises(ServerUnavailableError):
        pool.wait_ready()


def test_bug_is_an_error_of_all_pictures(
    light_pool: Callable[..., PicturePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = light_pool()
    with stopped(pool):
        futures = in_flight(pool, 3)
        monkeypatch.setattr(pool_module, "Pixels", None)
    kinds = [type(one.exception(30)) for one in futures]
    assert set(kinds) <= {TypeError, EngineError}
    assert isinstance(pool.process(PICTURE, "here").exception(30), EngineError)


def test_processor_that_cannot_be_made_is_reported(
    light_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", light_path)
    settings = msgspec.structs.replace(QWEN, fields=QWEN.fields | {"size": {"sides": 3}})
    pool = PicturePool(settings, PictureLimits())
    pool.start()
    future = pool.process(PICTURE, "here")
    with pytest.raises(EngineError, match="cannot be used: ValueError: the size has sides"):
        pool.wait_ready()
    assert isinstance(future.exception(30), EngineError)
    assert isinstance(pool.measure(PICTURE, "here").exception(0), EngineError)
    pool.close()


def test_process_that_cannot_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper.sys, "executable", "/bin/false")
    pool = PicturePool(QWEN, PictureLimits())
    pool.start()
    with pytest.raises(ServerUnavailableError, match=r"ended 4 times within 10 .*exit code 1"):
        pool.wait_ready()
    pool.close()


JOB = Job("file", 0)


def answered(message: bytes, job: Job = JOB) -> tuple[Done | Refused, bytes]:
    """Ask a worker that sends these bytes."""
    ours, theirs = socket.socketpair()
    with theirs, ours:
        theirs.sendall(message)
        theirs.shutdown(socket.SHUT_WR)
        return Worker(Channel(ours)).ask(job, b"", 5.0)


def encoded(message: msgspec.Struct) -> bytes:
    return frame(msgspec.msgpack.encode(message))


def test_answer_of_a_worker_is_read() -> None:
    done = Done(1, 2, (1,), (2, 3), "uint8", 6)
    assert answered(encoded(done) + b"pixels") == (done, b"pixels")


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xff" * 8,
        frame(b"not msgpack"),
        encoded(JOB),
        encoded(Done(0, 2, (1,), (2, 3), "uint8", 6)) + b"pixels",
        encoded(Done(1, 2, (1,), (2, 3), "uint8", 6)) + b"pix",
        encoded(Done(1, 2, (1,), (2, 3), "uint8", 7)) + b"pixels.",
        encoded(Done(1, 2, (1,), (2, 3), "float32", 6)) + b"pixels",
        encoded(Done(1, 2, (1,), (-2, -3), "uint8", 6)) + b"pixels",
    ],
    ids=[
        "nothing", "length", "garbage", "other message", "width", "short", "long", "type",
        "negative",
    ],
)  # fmt: skip
def test_answer_that_is_wrong_ends_the_worker(message: bytes) -> None:
    with pytest.raises(WorkerLostError):
        answered(message)


def test_answer_that_is_too_long_is_not_awaited() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(encoded(Done(1, 2, (1,), (2**29,), "uint8", 2**29)))
        with pytest.raises(WorkerLostError):
            Worker(Channel(ours)).ask(JOB, b"", 5.0)
