"""A served pipeline: its last stage, which samples, dies, and no answer is lost."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from tests.api.conftest import Reference
from tests.server import Server, gone, until
from tests.serving.test_ranks import PROMPTS, TOKENS, ask, ranks


def test_streams_survive_the_death_of_a_stage_and_a_signal_ends_all(
    start: Callable[..., Server], model: Any, reference: Reference
) -> None:
    server = start("--pipeline-parallel-size", "2", model=model)
    [last] = ranks(server)
    answers = ask(server, lambda: last.send_signal(signal.SIGKILL))
    assert [a.text for a in answers] == reference.texts(PROMPTS, TOKENS)
    assert {a.error for a in answers} == {None}
    assert server.stderr.count("rank 1 ended unexpectedly (killed by signal 9)") == 1
    assert "Traceback" not in server.stderr
    until(lambda: gone(last))
    assert server.http.get("/server_info").json()["models"][0]["device"]["world_size"] == 2
    [successor] = ranks(server)
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    assert gone(successor)
