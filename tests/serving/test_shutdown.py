"""Shutdown: in order, after the timeout, and during start-up."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.server import (
    WAIT,
    Client,
    Process,
    Server,
    gone,
    hook_environment,
    put_under_load,
    until,
)

LONG = 300
"""Tokens of an answer that takes half a minute as long as the server runs slowly."""
ENDLESS = 8000


def post(server: Server) -> httpx.Response:
    return server.http.post("/v1/completions", json={"prompt": [9], "max_tokens": 1})


def await_refusal(server: Server) -> None:
    """Wait until the server refuses new requests."""
    refused = until(lambda: (answer := post(server)).status_code == 503 and answer)
    assert "shutting down" in refused.json()["error"]["message"]
    assert refused.headers["retry-after"]
    assert server.http.get("/health").status_code == 200


def test_a_signal_finishes_open_requests_and_refuses_new_ones(start: Callable[..., Server]) -> None:
    """One process: see `test_systemd_is_notified_and_a_countdown_logged`."""
    server = start("--api-workers", "2")
    with server.slowly():
        clients = put_under_load(server, LONG)
        server.signal(signal.SIGTERM)
        await_refusal(server)
        assert not any(c.num_tokens for c in clients), (
            "a request finished before the new one was refused"
        )
    for client in clients:
        client.finish()
    assert [(c.status, c.num_tokens, c.broken) for c in clients] == [(200, LONG, None)] * 4
    assert server.wait() == 0
    assert gone(server.core)
    assert "Traceback" not in server.stderr
    assert server.popen.stdout.read() == ""


def check_cut_off(server: Server, clients: list[Client]) -> None:
    assert server.wait() == 0
    for client in clients:
        client.finish()
        assert client.broken is None
        assert client.num_tokens is None
        assert "shutting down" in client.error
    assert [c.status for c in clients] == [503, 200, 200, 200]
    assert gone(server.core)
    assert "Traceback" not in server.stderr
    assert server.popen.stdout.read() == ""


@pytest.mark.parametrize("num_workers", [1, 2])
def test_after_the_timeout_requests_end_with_an_error(
    start: Callable[..., Server], num_workers: int
) -> None:
    """A client that has stopped reading does not delay the shutdown."""
    server = start("--shutdown-timeout", "0.3", "--api-workers", str(num_workers))
    body = {
        "prompt": [5],
        "max_tokens": ENDLESS,
        "ignore_eos": True,
        "stream": True,
        "logprobs": 20,
    }
    with (
        server.slowly(),
        httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=WAIT) as answer,
    ):
        chunks = answer.iter_raw()
        next(chunks)  # then reads no more
        clients = put_under_load(server, ENDLESS, num_others=1)
        server.signal(signal.SIGTERM)
        check_cut_off(server, clients)


@pytest.mark.parametrize(("num_workers", "num_children"), [(1, 1), (2, 3)])
def test_a_signal_during_start_up_ends_all_processes(
    bare_model: Path, tmp_path: Path, num_workers: int, num_children: int
) -> None:
    (held := tmp_path / "held").mkdir()
    # The core is still starting when the signal comes.
    (held / "toolkit.engine.cores.core_process").touch()
    flags = ("--port", "0", "--api-workers", str(num_workers))
    process = Process("serve", str(bare_model), *flags, cwd=tmp_path, **hook_environment(held))
    try:
        until(lambda: len(process.children("toolkit.")) == num_children)
        children = process.children("toolkit.")
        process.popen.send_signal(signal.SIGTERM)
        (held / "toolkit.engine.cores.core_process").unlink()
        process.wait()
        assert all(gone(child) for child in children)
        assert "Traceback" not in process.stderr
        assert "ready" not in process.stderr
    finally:
        process.stop()
