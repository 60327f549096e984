"""Client addresses behind a proxy: X-Forwarded-For counts only from trusted proxies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.local import LocalServer
from tests.server import Client, Server, until

COMPLETIONS = "/v1/completions"
LIMITS = ("--max-requests-per-key", "1", "--log-format", "json", "--uvicorn-log-level", "info")


@pytest.fixture(scope="module", params=["127.0.0.0/8", "10.0.0.0/8"])
def proxied(
    request: pytest.FixtureRequest, bare_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, bool]]:
    """A server whose clients are on this machine, and whether it trusts proxies there."""
    flags = ("--forwarded-allow-ips", request.param)
    server = LocalServer(str(bare_model), *LIMITS, *flags, cwd=tmp_path_factory.mktemp("cwd"))
    yield server, request.param.startswith("127")
    server.stop()


def test_no_proxy_is_trusted_by_default(server: Server) -> None:
    with server.slowly():
        running = Client(server, 8000, headers={"X-Forwarded-For": "192.0.2.1"})
        until(lambda: running.events)
        [live] = server.http.get("/tk/requests").json()["requests"]
        assert live["origin"] == "127.0.0.1"
        server.http.delete(f"/tk/requests/{live['id']}")
        running.finish()
    until(server.is_idle)


def test_only_a_trusted_proxy_sets_the_client_address(
    proxied: tuple[Server, bool],
) -> None:
    server, trusts = proxied
    with server.slowly():
        check_origins(server, trusts)


def check_origins(server: Server, trusts: bool) -> None:
    def ask(forwarded: str) -> int:
        headers = {"X-Forwarded-For": forwarded, "X-Request-Id": forwarded.replace(", ", "-")}
        return server.http.post(
            COMPLETIONS, json={"prompt": [1], "max_tokens": 1}, headers=headers
        ).status_code

    running = Client(server, 8000, headers={"X-Forwarded-For": "192.0.2.1"})
    until(lambda: running.events)
    [live] = server.http.get("/tk/requests").json()["requests"]
    assert live["origin"] == ("192.0.2.1" if trusts else "127.0.0.1")

    assert ask("192.0.2.1") == 429, "one request is this client's limit"
    assert ask("192.0.2.2") == (200 if trusts else 429), "another client has its own limit"
    # A client can put any address before the proxy's: the last one that is no proxy is the client.
    assert ask("192.0.2.3, 192.0.2.1") == 429
    assert ask("192.0.2.1, 192.0.2.4") == (200 if trusts else 429)

    server.http.delete(f"/tk/requests/{live['id']}")
    running.finish()
    until(server.is_idle)
    until(lambda: '"192.0.2.1-192.0.2.4"' in server.stderr)
    lines = [json.loads(line) for line in server.stderr.splitlines() if line.startswith("{")]
    clients = {line["request_id"]: line["client"] for line in lines if "request_id" in line}
    assert clients["192.0.2.1-192.0.2.4"] == ("192.0.2.4" if trusts else "127.0.0.1")
    assert clients["192.0.2.3-192.0.2.1"] == ("192.0.2.1" if trusts else "127.0.0.1")
    access = [
        line["message"]
        for line in lines
        if f"POST {COMPLETIONS} HTTP/1.1" in line.get("message", "")
    ]
    assert any(message.startswith("192.0.2.4:") for message in access) == trusts
