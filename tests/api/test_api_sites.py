"""Requests that pages of other sites make a browser send, and ambiguous headers."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator

import pytest

from tests.local import LocalServer
from tests.server import Server
from toolkit.config import ServerConfig
from toolkit.errors import ConfigError
from toolkit.serving.lifecycle import warn_of_visible_keys

ORIGIN = "http://App.example"


@pytest.fixture(scope="module")
def opened(checkpoint, tmp_path_factory) -> Iterator[Server]:
    """A server on this machine without keys."""
    given = ("--allowed-hosts", "proxy.example", "--allowed-origins", ORIGIN)
    served = LocalServer(str(checkpoint("gpt2")), *given, cwd=tmp_path_factory.mktemp("server"))
    yield served
    served.stop()


@pytest.fixture(scope="module")
def locked(checkpoint, tmp_path_factory) -> Iterator[Server]:
    served = LocalServer(
        str(checkpoint("gpt2")), "--api-key", "k", cwd=tmp_path_factory.mktemp("server")
    )
    yield served
    served.stop()


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/metrics", "/docs"])
@pytest.mark.parametrize(
    ("host", "is_refused"),
    [
        ("localhost", False),
        ("127.0.0.1:8000", False),
        ("127.9.9.9", False),
        ("[::1]:8000", False),
        ("tk.localhost:80", False),
        ("Proxy.Example:443", False),
        ("evil.example", True),
        ("evil.example:8000", True),
        ("localhost.evil.example", True),
        ("127.0.0.1.evil.example", True),
        ("10.0.0.1", True),
        ("[::1", True),
    ],
)
def test_hosts_of_other_sites_are_refused_without_keys(opened, locked, path, host, is_refused):
    answer = opened.http.get(path, headers={"Host": host})
    assert answer.status_code == (403 if is_refused else 200)
    if is_refused:
        error = answer.json()["error"]
        assert error["code"] == "host_not_allowed"
        assert "--allowed-hosts" in error["message"]
    key = {"Authorization": "Bearer k"}
    assert locked.http.get(path, headers=key | {"Host": host}).status_code == 200


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/v1/completions"])
def test_pages_of_other_origins_change_nothing_without_keys(opened, locked, path):
    body = {"prompt": "a", "max_tokens": 1}
    same = opened.url
    for origin, is_refused in (
        (same, False),
        (ORIGIN, False),
        ("https://evil.example", True),
        ("null", True),
        (same + "0", True),
    ):
        answer = opened.http.post(path, json=body, headers={"Origin": origin})
        assert answer.status_code == (403 if is_refused else 200), origin
        assert not is_refused or answer.json()["error"]["code"] == "origin_not_allowed"
    assert opened.http.get("/v1/models", headers={"Origin": "null"}).status_code == 200
    evil = {"Authorization": "Bearer k", "Origin": "https://evil.example"}
    assert locked.http.post(path, json=body, headers=evil).status_code == 200


@pytest.mark.parametrize(
    ("again", "status"),
    [
        ([], 200),
        (["Host: 127.0.0.1"], 400),
        (["Authorization: Bearer k"], 400),
        (["X-API-Key: a", "X-API-Key: k"], 400),
        (["Content-Type: application/json"], 400),
        (["Transfer-Encoding: gzip, chunked"], 400),
    ],
)
def test_ambiguous_headers_are_refused(locked, again, status):
    address = locked.http.base_url
    single = ["Host: 127.0.0.1", "Authorization: Bearer k", "Content-Type: application/json"]
    body = json.dumps({"prompt": "a", "max_tokens": 1})
    if any("Transfer" in line for line in again):
        body = f"{len(body):x}\r\n{body}\r\n0\r\n\r\n"
    else:
        single.append(f"Content-Length: {len(body)}")
    request = ["POST /v1/completions HTTP/1.1", *single, *again, "Connection: close", "", body]
    with socket.create_connection((address.host, address.port), timeout=30) as connection:
        connection.sendall("\r\n".join(request).encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(f"HTTP/1.1 {status}".encode())


def test_credentials_for_every_site_are_refused():
    with pytest.raises(ConfigError, match="--allow-credentials would let every site"):
        ServerConfig(allowed_origins=("*",), allow_credentials=True)
    ServerConfig(allowed_origins=(ORIGIN,), allow_credentials=True)


@pytest.mark.parametrize(
    ("arguments", "warns"),
    [(["--api-key", "k"], True), (["--admin-key=k"], True), (["--api-key-file", "f"], False)],
)
def test_keys_on_the_command_line_are_warned_of(caplog, arguments, warns):
    with caplog.at_level(logging.WARNING):
        warn_of_visible_keys(["tk", "serve", *arguments])
    assert ("--api-key-file do not" in caplog.text) == warns
