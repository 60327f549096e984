"""Processes that decode sound files: limits, crashes, and memory of results."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.pictures.running import children_of, living
from tests.server import until
from tests.speech.files import encoded, tone, written
from toolkit.errors import InvalidRequestError, ServerUnavailableError
from toolkit.speech.messages import SoundLimits
from toolkit.speech.pool import SoundPool
from toolkit.speech.sound import decode
from toolkit.zygote.keeper import KeeperServer

FILE = written(tone(1.0, 44_100), 44_100)


@pytest.fixture
def start() -> Iterator[Callable[..., SoundPool]]:
    """Return a function that starts a pool for one test; its arguments are limits."""
    pools = []

    def start_pool(keeper_path: str = "", **limits: object) -> SoundPool:
        pools.append(SoundPool(SoundLimits(**limits), keeper_path))
        pools[-1].start()
        return pools[-1]

    yield start_pool
    for one in pools:
        one.close()


@pytest.fixture(scope="module")
def pool() -> Iterator[SoundPool]:
    pool = SoundPool(SoundLimits())
    pool.start()
    yield pool
    pool.close()


def workers_of(pool: SoundPool) -> list[psutil.Process]:
    pool.wait_ready()
    return children_of(psutil.Process(pool.zygote_pid))


@pytest.mark.parametrize("place", ["memory", "mapped", "path"])
def test_file_is_decoded_wherever_it_is(pool: SoundPool, place: str, tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(FILE)
    source: bytes | mmap.mmap | Path = FILE
    if place == "mapped":
        with path.open("rb") as file:
            source = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    elif place == "path":
        source = path
    np.testing.assert_allclose(pool.decode(source).result(30), decode(FILE, 10), atol=1)


def test_extra_formats_are_decoded_by_workers(pool: SoundPool):
    files = [written(tone(1.0, 16_000), 16_000, "MP3", "MPEG_LAYER_III"), encoded("mp4", "aac")]
    for one in files:
        np.testing.assert_allclose(pool.decode(one).result(30), decode(one, 10), atol=1)


@pytest.mark.parametrize(
    ("limits", "source", "problem"),
    [
        ({}, b"x", "audio is not a sound file that can be read"),
        ({}, Path("/nowhere/x.wav"), "audio cannot be read: /nowhere/x.wav: No such file"),
        ({}, Path("/dev/zero"), "audio cannot be read: /dev/zero: it is not a regular file"),
        ({"max_seconds": 1}, written(tone(2.0, 8000), 8000), "audio has more than 1 seconds"),
        ({"max_bytes": 9}, FILE, "audio is a file of 88,244 bytes; at most 9 are allowed"),
        ({"timeout": 1e-4}, FILE, "audio takes longer than 0.0001 seconds to decode"),
    ],
)  # fmt: skip
def test_file_beyond_a_limit_is_refused(
    start: Callable[..., SoundPool], limits: dict, source: bytes | Path, problem: str
):
    with pytest.raises(InvalidRequestError, match=problem) as refused:
        start(**limits).decode(source, "audio").result(30)
    assert refused.value.param == "audio"


def test_killed_worker_fails_only_its_file(start: Callable[..., SoundPool]):
    pool = start()
    workers = workers_of(pool)
    for one in workers:
        one.suspend()
    futures = [pool.decode(FILE) for _ in range(6)]
    until(lambda: sum(one.running() for one in futures) == 2)
    workers[0].kill()
    workers[1].resume()
    errors = [one.exception(30) for one in futures]
    (error,) = [one for one in errors if one]
    assert isinstance(error, InvalidRequestError)
    assert "file cannot be decoded: the process that decoded it was ended by SIGKILL" in str(error)


def test_dead_zygote_is_replaced_and_files_decoded(start: Callable[..., SoundPool]):
    pool = start()
    old = workers_of(pool)
    os.kill(pool.zygote_pid, signal.SIGKILL)
    until(lambda: not living(old))
    assert len(pool.decode(FILE).result(30)) == 16_000


def test_samples_in_flight_are_limited(start: Callable[..., SoundPool]):
    pool = start(bytes_in_flight=80_000)
    held = [pool.decode(FILE).result(30)[100:] for _ in range(2)]
    with pytest.raises(ServerUnavailableError, match="has 64,000 bytes; the 32,000 of this file"):
        pool.decode(FILE).result(30)
    held.pop()
    assert len(pool.decode(FILE).result(30)) == 16_000


def test_pools_of_several_processes_share_a_zygote(start: Callable[..., SoundPool], tmp_path: Path):
    before = psutil.Process().children()
    server = KeeperServer(str(tmp_path / "zygotes"))
    pools = [start(str(tmp_path / "zygotes")) for _ in range(2)]
    assert all(len(one.decode(FILE).result(30)) == 16_000 for one in pools)
    zygotes = [one for one in psutil.Process().children() if one not in before]
    assert len(zygotes) == 1
    for one in pools:
        one.close()
    server.close()
    assert living(zygotes) == []


def test_files_that_need_no_decoding_need_no_process():
    """In a pool that was never started. What is refused, or damaged, is left to a worker."""
    idle = SoundPool(SoundLimits(max_seconds=2, bytes_in_flight=100_000))
    plain = written(tone(1.5, 16_000), 16_000)
    piped = plain[:40] + b"\xff\xff\xff\xff" + plain[44:] + b"\0"
    for file in (plain, piped, plain[:-2001]):
        found = idle.decode(file)
        assert found.done()
        np.testing.assert_array_equal(found.result(), decode(file, 10.0))
        del found
    held = [idle.decode(plain) for _ in range(3)]
    assert [type(one.exception()) for one in held] == [type(None)] * 2 + [ServerUnavailableError]
    others = (
        written(tone(3.0, 16_000), 16_000),
        written(np.stack([tone(0.1, 16_000)] * 2, axis=1), 16_000),
        written(tone(0.1, 16_000), 16_000, subtype="FLOAT"),
        FILE,
        plain[:44],
        plain[:30],
        b"",
    )
    assert not any(idle.decode(file).done() for file in others)
    idle.close()
