"""Pictures of several API workers: one zygote decodes them, whatever dies."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests import seeing
from tests.pictures.running import children_of, living
from tests.pictures.samples import data_url, gradient, saved
from tests.server import WAIT, Server, until

COUNT = 6  # requests at once


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two API workers. The last test ends it."""
    root = tmp_path_factory.mktemp("pictures")
    folder = seeing.save(root / "seeing")
    flags = ("--api-workers", "2", "--num-gpu-blocks-override", "300", "--mm-cache-gib", "0.001")
    served = Server(str(folder), *flags, cwd=root)
    yield served
    served.stop()


class Asking:
    """Requests with a new picture each, from threads: every other one to each API worker."""

    number = 0  # of the last picture

    def __init__(self, server: Server, count: int = COUNT) -> None:
        self.results: list[str] = []  # texts, and errors
        self._url = server.url
        self._threads = []
        for _ in range(count):
            Asking.number += 1
            picture = data_url(saved(gradient(44, 30 + Asking.number)))
            self._threads.append(threading.Thread(target=self._ask, args=(picture,)))
        for one in self._threads:
            one.start()

    def finish(self) -> list[str]:
        for one in self._threads:
            one.join(WAIT)
        return self.results

    def _ask(self, picture: str) -> None:
        part = {"type": "image_url", "image_url": {"url": picture}}
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": [part]}],
            "max_tokens": 4,
            "ignore_eos": True,
        }
        try:
            done = httpx.post(f"{self._url}/v1/chat/completions", json=body, timeout=WAIT)
            found = done.json()
        except httpx.HTTPError as error:
            self.results.append(f"error: {error}")
            return
        if "error" in found:
            self.results.append(f"error: {found['error']['message']}")
        else:
            self.results.append(found["choices"][0]["message"]["content"])


def errors(results: list[str]) -> list[str]:
    assert len(results) == COUNT
    return [one for one in results if one.startswith("error: ")]


def zygote_of(server: Server) -> psutil.Process:
    """Return the only zygote of all processes of the server."""
    family = living(psutil.Process(server.pid).children(recursive=True))
    found = [one for one in family if "toolkit.zygote.process" in one.cmdline()]
    # Forked workers have the same command line.
    (zygote,) = [one for one in found if one.ppid() not in {other.pid for other in found}]
    assert zygote.ppid() == server.pid
    return zygote


def stop_workers(server: Server) -> list[psutil.Process]:
    """Stop the processes that decode pictures."""
    workers = children_of(zygote_of(server))
    for one in workers:
        one.suspend()
    return workers


def ask_with_stopped_workers(server: Server) -> tuple[Asking, list[psutil.Process]]:
    """Send requests, and wait until all have arrived and both stopped workers have a picture."""
    workers = stop_workers(server)
    before = num_sockets(server)
    until(lambda: num_clients(server) == 0)
    asking = Asking(server)
    until(lambda: num_clients(server) == COUNT)
    until(lambda: num_sockets(server) == before + len(workers))
    return asking, workers


def num_clients(server: Server) -> int:
    """Return the number of clients' connections that the API workers have."""
    found = [one for process in server.workers for one in process.net_connections("tcp")]
    return sum(one.status == psutil.CONN_ESTABLISHED for one in found)


def num_sockets(server: Server) -> int:
    """Return the number of Unix sockets of the API workers: one leads to each worker in use."""
    return sum(len(one.net_connections("unix")) for one in server.workers)


def resume(workers: list[psutil.Process]) -> None:
    for one in living(workers):
        one.resume()


def test_one_zygote_decodes_for_all_api_workers(server: Server) -> None:
    zygote = zygote_of(server)
    workers = children_of(zygote)
    assert errors(Asking(server).finish()) == []
    assert zygote_of(server) == zygote
    assert children_of(zygote) == workers
    assert all(one.children() == [] for one in server.workers)


def test_killed_picture_worker_fails_one_request(server: Server) -> None:
    asking, workers = ask_with_stopped_workers(server)
    workers[0].kill()
    resume(workers)
    (error,) = errors(asking.finish())
    assert "the process that decoded it was ended by SIGKILL" in error
    assert len(children_of(zygote_of(server))) == 2


def test_dead_zygote_is_replaced_for_all_api_workers(server: Server) -> None:
    old = zygote_of(server)
    asking, _ = ask_with_stopped_workers(server)
    old.kill()
    assert errors(asking.finish()) == []
    assert zygote_of(server).pid != old.pid
    assert len(children_of(zygote_of(server))) == 2


def test_dead_api_worker_leaves_pictures_to_others(server: Server) -> None:
    zygote, before = zygote_of(server), server.workers
    asking, workers = ask_with_stopped_workers(server)
    before[0].kill()
    resume(workers)
    assert len(errors(asking.finish())) == COUNT // 2
    until(lambda: len(server.workers) == 2 and before[0] not in server.workers)
    until(lambda: errors(Asking(server).finish()) == [])
    assert zygote_of(server) == zygote
    assert len(children_of(zygote)) == 2


def test_no_process_outlives_a_killed_server(server: Server) -> None:
    family = psutil.Process(server.pid).children(recursive=True)
    stop_workers(server)
    server.signal(signal.SIGKILL)
    until(lambda: not living(family))
