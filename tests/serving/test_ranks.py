"""A served model on several ranks: one dies or hangs, and no answer is lost."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from tests.api.conftest import Reference
from tests.server import WAIT, Server, command, gone, until
from tests.serving.test_recovery import Answer, streamed
from toolkit.units import count

TOKENS = 96
PROMPTS = [f"Story number {i}: " for i in range(8)]
BODIES = [
    {"prompt": p, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True} for p in PROMPTS
]


def ranks(server: Server) -> list[psutil.Process]:
    """Processes of all ranks but the first."""
    [core] = server.children("toolkit.engine.cores.core_process")
    return [child for child in core.children() if "toolkit.executor.rank" in command(child)]


def ask(server: Server, harm: Callable[[], object]) -> list[Answer]:
    """Stream all answers, and call `harm` when each has started."""
    return asyncio.run(streamed(server, BODIES, harm))


@pytest.fixture(scope="module")
def server(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two ranks. The last test ends it."""
    flags = ("--tensor-parallel-size", "2", "--worker-timeout", "3")
    served = Server(str(model), *flags, cwd=tmp_path_factory.mktemp("ranks"))
    yield served
    served.stop()


def test_streams_survive_a_rank_that_hangs(server: Server, reference: Reference) -> None:
    """See `test_pipeline_server` for one that is killed."""
    assert f"({count(reference.model.num_parameters())} parameters" in server.stderr, "of all ranks"
    [rank] = ranks(server)
    answers = ask(server, rank.suspend)
    assert [a.text for a in answers] == reference.texts(PROMPTS, TOKENS)
    assert {a.error for a in answers} == {None}
    cause = "rank 1 has not finished step"
    assert server.stderr.count(cause) == 1, "the cause is logged once"
    assert "Traceback" not in server.stderr
    until(lambda: gone(rank))
    [other] = ranks(server)
    assert other.pid != rank.pid
    assert server.http.get("/server_info").json()["models"][0]["device"]["world_size"] == 2


def test_the_only_engine_is_replaced_with_its_ranks(server: Server, reference: Reference) -> None:
    [hung] = server.cores
    [rank] = ranks(server)
    answers = ask(server, hung.suspend)
    assert [a.text for a in answers] == reference.texts(PROMPTS, TOKENS)
    assert {(a.finish_reason, a.usage["completion_tokens"], a.error) for a in answers} == {
        ("length", TOKENS, None)
    }
    assert server.stderr.count("alive but has made no step for 3 s") == 1
    assert "Traceback" not in server.stderr
    until(lambda: all(map(gone, [hung, rank])))
    assert server.cores != [hung]


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux wakes a stopped process when its parent ends"
)
def test_stopped_processes_end_with_the_server(server: Server) -> None:
    everything = [*psutil.Process(server.pid).children(recursive=True)]
    stopped = [*server.cores, *ranks(server)]
    assert len(stopped) == 2
    for process in stopped:
        process.suspend()
    server.signal(signal.SIGKILL)
    server.popen.wait(WAIT)
    until(lambda: all(gone(process) for process in everything))
