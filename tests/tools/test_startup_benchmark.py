"""The start-up benchmark of a server."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable

import pytest

from tests.forked import ForkedProcess, shared, stand_in
from tools.bench import server_process, startup


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that runs the benchmark here. Its servers are forked."""
    fork_server = shared()
    if fork_server is not None:
        start = functools.partial(ForkedProcess, fork_server, start_new_session=True)
        monkeypatch.setattr(server_process, "subprocess", stand_in(start))

    def run(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["startup", *arguments])
        startup.main()

    return run


def test_each_start_is_a_row_with_the_phases_of_the_log(run, checkpoint, capsys):
    run(str(checkpoint("gpt2")), "--starts", "2", "--num-threads", "1", "--kv-cache-memory", "0.01")
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 2
    for row in rows:
        assert list(row["phases"]) == ["config", "weights", "KV cache"]
        assert sum(row["phases"].values()) < row["ready_s"] < 300
        assert row["first_answer_ms"] > 0


def test_output_of_a_failed_server_is_printed(run, tmp_path, capsys):
    with pytest.raises(SystemExit, match=r"^tk serve ended with exit code 2\.$"):
        run(str(tmp_path), "--starts", "2")
    printed = capsys.readouterr()
    assert printed.out == ""
    [server_error] = printed.err.strip().splitlines()
    assert str(tmp_path) in server_error
