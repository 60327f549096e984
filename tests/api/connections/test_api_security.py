"""Keys, CORS, limits per client, invalid HTTP, TLS, and the log."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import trustme

from tests.api.conftest import CONTEXT
from tests.local import LocalServer
from tests.server import WAIT, Client, Process, Server, gone, put_under_load, until
from toolkit import __version__
from toolkit.api.http.connections.listener import tls
from toolkit.config import ServerConfig
from toolkit.errors import ConfigError

COMPLETIONS = "/v1/completions"
SHORT = {"prompt": [1, 2], "max_tokens": 1}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def error(answer: httpx.Response, status: int) -> dict[str, str | None]:
    assert answer.status_code == status, answer.text
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
    return answer.json()["error"]


# ---- keys


@pytest.fixture(scope="module")
def guarded(bare_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with all kinds of keys, CORS, a root path, and low limits."""
    folder = tmp_path_factory.mktemp("guarded")
    keys = "\ufefffrom-the-file\n# those of the team\n\nalso-from-the-file\n"  # as Windows saves it
    (folder / "keys").write_text(keys, "utf-8")
    server = LocalServer(
        str(bare_model),
        *(
            "--api-key",
            "first",
            "--api-key",
            "second",
            "--api-key-file",
            "keys",
            "--admin-key",
            "boss",
        ),
        *("--allowed-origins", "https://app.example", "--root-path", "/llm"),
        *("--max-requests-per-key", "2", "--max-queue", "1", "--max-num-seqs", "3"),
        *("--otlp-traces-endpoint", "http://user:s3cret@127.0.0.1:9/v1/traces"),
        *("--chat-template", "{{ 'a house secret' }}"),
        cwd=folder,
    )
    yield server
    server.stop()


@pytest.mark.parametrize("key", ["first", "second", "from-the-file", "also-from-the-file", "boss"])
def test_each_key_is_accepted(guarded: Server, key: str) -> None:
    assert guarded.http.post(COMPLETIONS, json=SHORT, headers=bearer(key)).status_code == 200
    assert guarded.http.post(COMPLETIONS, json=SHORT, headers={"X-API-Key": key}).status_code == 200


@pytest.mark.parametrize(
    "key", ["x", "firs", "first2", "first,second", "# those of the team", "ключ"]
)
def test_other_keys_are_rejected(guarded: Server, key: str) -> None:
    headers = {"Authorization": f"Bearer {key}".encode()}
    answer = guarded.http.post(COMPLETIONS, json=SHORT, headers=headers)
    assert error(answer, 401)["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"


def test_all_routes_but_probes_need_a_key(guarded: Server) -> None:
    paths = guarded.http.get("/openapi.json").json()["paths"]
    for path, methods in paths.items():
        for method in methods:
            answer = guarded.http.request(method, path.replace("{model}", "x"))
            open_paths = ("/", "/livez", "/readyz", "/health", "/ping", "/version", "/metrics")
            is_open = path in open_paths
            assert (answer.status_code == 401) != is_open, (method, path, answer.status_code)


def test_operator_routes_need_the_admin_key(guarded: Server) -> None:
    path = "/reset_prefix_cache"
    error(guarded.http.post(path), 401)
    assert error(guarded.http.post(path, headers=bearer("first")), 403)["code"] == "admin_only"
    assert guarded.http.post(path, headers=bearer("boss")).status_code == 200


def test_server_info_has_no_secrets(guarded: Server) -> None:
    answer = guarded.http.get("/server_info", headers=bearer("boss"))
    info = answer.json()
    for secret in ("boss", "also-from-the-file", "s3cret"):
        assert secret not in answer.text
    assert info["server"]["otlp_traces_endpoint"] == "http://127.0.0.1:9/v1/traces"
    assert info["server"]["max_requests_per_key"] == 2
    assert "a house secret" not in guarded.http.get("/metrics").text
    assert info["models"][0]["engine"]["scheduler"]["max_num_seqs"] == 3
    assert info["models"][0]["device"]["max_model_len"] == CONTEXT
    assert info["version"] == __version__


@pytest.fixture(scope="module")
def limited(bare_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with keys from the variable, a rate limit, and a log for readers."""
    flags = ("--requests-per-minute", "3", "--log-format", "text")
    folder = tmp_path_factory.mktemp("limited")
    server = LocalServer(str(bare_model), *flags, cwd=folder, TK_API_KEY="one, two, a, b, c")
    yield server
    server.stop()


def test_keys_are_read_from_the_variable(limited: Server) -> None:
    assert [
        limited.http.post(COMPLETIONS, json=SHORT, headers=bearer(key)).status_code
        for key in ("one", "two", "one, two")
    ] == [200, 200, 401]


# ---- browsers and proxies


def test_only_allowed_origins_pass_cors(guarded: Server) -> None:
    def preflight(origin: str) -> httpx.Response:
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        return guarded.http.options(COMPLETIONS, headers=headers)

    allowed = preflight("https://app.example")
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://app.example"
    assert allowed.headers["x-content-type-options"] == "nosniff"
    assert "origin" in error(preflight("https://evil.example"), 400)["message"]
    counted = guarded.metric("http_requests_total", method="OPTIONS", status="2xx")
    named = guarded.http.options(
        COMPLETIONS,
        headers={
            "Origin": "https://app.example",
            "Access-Control-Request-Method": "POST",
            "X-Request-Id": "before-the-flight",
        },
    )
    assert named.headers["x-request-id"] == "before-the-flight"
    until(
        lambda: guarded.metric("http_requests_total", method="OPTIONS", status="2xx") == counted + 1
    )
    refused = guarded.http.post(COMPLETIONS, json=SHORT, headers={"Origin": "https://app.example"})
    error(refused, 401)
    assert refused.headers["access-control-allow-origin"] == "https://app.example", (
        "the page can read the error"
    )
    answer = guarded.http.post(
        COMPLETIONS, json=SHORT, headers=bearer("first") | {"Origin": "https://app.example"}
    )
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    assert "X-Ignored-Fields" in answer.headers["access-control-expose-headers"]


def test_every_response_has_security_headers(guarded: Server) -> None:
    for answer in (
        guarded.http.get("/health"),
        guarded.http.post(COMPLETIONS),
        guarded.http.get("/no"),
    ):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["referrer-policy"] == "no-referrer"


def test_the_documentation_includes_the_root_path(guarded: Server) -> None:
    assert guarded.http.get("/openapi.json").json()["servers"] == [{"url": "/llm"}]
    assert "/llm/openapi.json" in guarded.http.get("/docs").text


def test_the_root_path_may_be_left_in_the_path(guarded: Server) -> None:
    """Some proxies strip it, others do not. Access is that of the path without it."""
    assert guarded.http.get("/llm/health").status_code == 200
    for path, status in ((f"/llm{COMPLETIONS}", 200), (f"/llm/llm{COMPLETIONS}", 404)):
        answer = guarded.http.post(path, json=SHORT, headers=bearer("first"))
        assert answer.status_code == status
        error(guarded.http.post(path, json=SHORT), 401)
    error(guarded.http.get("/llmhealth", headers=bearer("first")), 404)
    assert guarded.http.post("/llm/reset_prefix_cache", headers=bearer("first")).status_code == 403


@pytest.mark.parametrize("page", ["/docs", "/redoc"])
def test_the_documentation_is_self_contained_and_needs_no_key(guarded: Server, page: str) -> None:
    loaded = re.findall(r'(?:src|href)="([^"]+)"', guarded.http.get(page).text)
    assert len(loaded) >= 2
    for address in loaded:
        assert address.startswith("/llm/docs-files/")
        assert guarded.http.get(address.removeprefix("/llm")).status_code == 200
    error(guarded.http.get("/docs-files/nothing.js"), 404)


# ---- limits


@contextlib.contextmanager
def running(stream: httpx.Response) -> Iterator[None]:
    """Enter the block when the request runs."""
    chunks = stream.iter_raw()
    next(chunks)
    yield


def test_each_key_has_its_own_limit_of_open_requests(guarded: Server) -> None:
    body = {"prompt": [1], "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=guarded.url, timeout=60, headers=bearer("first")) as http:
        with (
            guarded.slowly(),
            http.stream("POST", COMPLETIONS, json=body) as one,
            running(one),
            http.stream("POST", COMPLETIONS, json=body) as two,
            running(two),
        ):
            assert (one.status_code, two.status_code) == (200, 200)
            until(lambda: guarded.metric("tk:num_requests_running") == 2)
            refused = http.post(COMPLETIONS, json=SHORT)
            assert error(refused, 429)["code"] == "rate_limit_exceeded"
            assert refused.headers["retry-after"] == "1"
            others = guarded.http.post(
                COMPLETIONS, json=SHORT | {"stream": True}, headers=bearer("second")
            )
            assert others.status_code == 200
        until(lambda: http.post(COMPLETIONS, json=SHORT).status_code == 200)
    assert guarded.metric("tk:admission_rejections_total", reason="key") >= 1


def test_a_full_queue_is_429_until_a_place_is_free(guarded: Server) -> None:
    """Three requests run and one waits, each of another key."""
    body = {"prompt": [1], "max_tokens": 6000, "ignore_eos": True, "stream": True}
    keys = ("first", "second", "from-the-file", "also-from-the-file")
    clients = [
        httpx.Client(base_url=guarded.url, timeout=60, headers=bearer(key), trust_env=False)
        for key in keys
    ]
    streams = [client.stream("POST", COMPLETIONS, json=body) for client in clients]
    try:
        with guarded.slowly():
            for number, stream in enumerate(streams, 1):
                assert stream.__enter__().status_code == 200
                until(lambda n=number: guarded.metric("tk:num_requests_running") == min(n, 3))
            until(lambda: guarded.metric("tk:num_requests_waiting") == 1)
            refused = guarded.http.post(COMPLETIONS, json=SHORT, headers=bearer("boss"))
            assert "wait to run" in error(refused, 429)["message"]
            assert int(refused.headers["retry-after"]) >= 1
            assert guarded.http.get("/health").status_code == 200
    finally:
        for stream in streams:
            stream.__exit__(None, None, None)
        for client in clients:
            client.close()
    until(
        lambda: (
            guarded.http.post(COMPLETIONS, json=SHORT, headers=bearer("boss")).status_code == 200
        )
    )


def test_a_time_limit(start_local: Callable[..., Server]) -> None:
    server = start_local("--request-timeout", "0.5")
    with server.slowly():
        check_time_limit(server)


def check_time_limit(server: Server) -> None:
    long = {"prompt": [1], "max_tokens": 8000, "ignore_eos": True}
    answer = server.http.post(COMPLETIONS, json=long)
    assert error(answer, 504)["type"] == "timeout_error"
    counted = server.metric("tk:errors_total", code="504")
    events = server.http.post(COMPLETIONS, json=long | {"stream": True}).text.strip().split("\n\n")
    # Its status was 200.
    until(lambda: server.metric("tk:errors_total", code="504") == counted + 1)
    until(lambda: "(not finished: The request was not finished within 0.5 s.)" in server.stderr)
    assert events[-1] == "data: [DONE]"
    assert "0.5 s" in json.loads(events[-2].removeprefix("data: "))["error"]["message"]
    search = long | {"use_beam_search": True, "best_of": 4}
    assert error(server.http.post(COMPLETIONS, json=search), 504)["type"] == "timeout_error"
    until(server.is_idle)


def test_a_rate_limit(limited: Server) -> None:
    """Three at once, then one per 20 s. On a slow machine the first three take some seconds."""

    def ask(key: str, path: str = COMPLETIONS) -> httpx.Response:
        return limited.http.post(path, json=SHORT, headers=bearer(key))

    assert [ask("a").status_code for _ in range(5)] == [200] * 3 + [429] * 2
    for path in ("/tokenize", "/detokenize"):
        error(ask("a", path), 429)
    assert 1 <= int(ask("a").headers["retry-after"]) <= 20
    assert ask("b").status_code == 200


# ---- bodies and invalid HTTP


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": ' + b"[" * 70 + b"1" + b"]" * 70 + b"}",
        b'{"prompt": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        b'{"prompt": [' + b"1," * (2**21 + 1) + b"1]}",
        b'{"prompt": "\\"' + b"[" * 70 + b'", "x": ' + b"[" * 70 + b"}",
    ],
    ids=["deep", "very deep", "many values", "unbalanced"],
)
def test_bodies_with_too_many_values_are_refused(server: Server, body: bytes) -> None:
    before = server.cpu_seconds()
    answer = server.http.post(
        COMPLETIONS, content=body, headers={"Content-Type": "application/json"}
    )
    assert any(word in error(answer, 400)["message"] for word in ("nested", "values", "lists"))
    assert server.cpu_seconds() - before < 5.0


def test_brackets_and_commas_in_strings_do_not_count(server: Server) -> None:
    prompt = '[{,\\"' * 400
    answer = server.http.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 1})
    assert answer.status_code == 200
    messages = [{"role": "user", "content": "x"}] * 200  # many objects, not nested
    answer = server.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    assert answer.status_code == 200


def raw(server: Server, sent: bytes) -> bytes:
    """Send bytes; return what is received until the end of a response or of the connection."""
    url = urlsplit(server.url)
    received = b""
    with socket.create_connection((url.hostname, url.port), timeout=WAIT) as connection:
        with contextlib.suppress(ConnectionError):  # the server may close before it has read all
            connection.sendall(sent)
        with contextlib.suppress(ConnectionError):
            while not is_complete(received) and (piece := connection.recv(65536)):
                received += piece
    return received


CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


def is_complete(answer: bytes) -> bool:
    head, ended, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: *(\d+)", head)
    return bool(ended and length and len(body) >= int(length[1]))


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Filler: " + b"a" * 70_000, b"431"),
        (b"GET /" + b"a" * 70_000, b"431"),
        (b"GET /health HTTP/1.1\r\n" + b"X-H: y\r\n" * 9000, b"431"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"400"),
        (b"NONSENSE\r\n\r\n", b"400"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
         b"Content-Length: " + b"9" * 20 + b"\r\n\r\n", b"4"),
        (CHUNKED + b"zz\r\n{}\r\n", b"400"),
        (CHUNKED + b"2\r\n{}\r\n-1\r\n", b"400"),
    ],
    ids=["a large header", "a large path", "many headers", "TLS", "nonsense", "a negative length",
         "a huge length", "an invalid chunk", "an invalid second chunk"],
)  # fmt: skip
def test_invalid_http_gets_the_usual_error_body(server: Server, sent: bytes, status: bytes) -> None:
    head, _, body = raw(server, sent).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status)
    assert json.loads(body)["error"]["message"]
    assert server.http.get("/health").status_code == 200


def test_data_after_an_early_response_gets_no_second_one(limited: Server) -> None:
    url = urlsplit(limited.url)
    with socket.create_connection((url.hostname, url.port), timeout=WAIT) as connection:
        connection.sendall(CHUNKED)
        received = connection.recv(65536)
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"zz\r\n")
            while piece := connection.recv(65536):
                received += piece
    assert received.startswith(b"HTTP/1.1 401")
    assert received.count(b"HTTP/1.1") == 1


def post_bytes(body: dict, length: int | None = None) -> bytes:
    """The bytes of a POST request. `length`: Content-Length, if not the actual one."""
    content = json.dumps(body, ensure_ascii=False).encode()
    length = len(content) if length is None else length
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (length, content)
    )


LONG = {"prompt": [1], "max_tokens": 64, "ignore_eos": True}


@pytest.mark.parametrize(
    ("sent", "rest", "tokens"),
    [
        (post_bytes(LONG), b"nonsense\r\n\r\n", [64]),
        (
            post_bytes(LONG) + post_bytes(SHORT) + b"nonsense\r\n\r\n",
            b"",
            [64, SHORT["max_tokens"]],
        ),
        (post_bytes(LONG) + CHUNKED + b"zz\r\n", b"more", [64]),
        (post_bytes(LONG), b"GET / HTTP/1.1\r\nX: " + b"a" * 1_000_000, [64]),
    ],
    ids=["nonsense", "nonsense after two", "an invalid chunk", "a head without end"],
)
def test_complete_requests_before_invalid_data_are_answered(
    server: Server, sent: bytes, rest: bytes, tokens: list[int]
) -> None:
    url = urlsplit(server.url)
    with socket.create_connection((url.hostname, url.port), timeout=WAIT) as connection:
        with server.slowly():  # the request still runs when the rest arrives
            connection.sendall(sent)
            with contextlib.suppress(ConnectionError):
                connection.sendall(rest)
        answers = connection.makefile("rb").read().split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] for answer in answers] == [b"200"] * len(tokens)
    usages = [json.loads(answer.partition(b"\r\n\r\n")[2])["usage"] for answer in answers]
    assert [usage["completion_tokens"] for usage in usages] == tokens
    assert b"connection: close" in answers[-1]


def test_a_head_behind_a_large_body_is_not_too_large(
    server: Server,
) -> None:
    """The body is refused before it has arrived. The next request follows in two packets."""
    large, small = post_bytes({"prompt": "x" * 33 * 2**20}), post_bytes(SHORT)
    url = urlsplit(server.url)
    with socket.create_connection((url.hostname, url.port), timeout=WAIT) as connection:
        connection.sendall(large + small[:20])
        time.sleep(0.2)
        connection.sendall(
            small[20:].replace(b"Host: localhost", b"Host: localhost\r\nConnection: close")
        )
        answers = connection.makefile("rb").read().split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] for answer in answers] == [b"413", b"200"]


def test_a_content_length_in_characters_is_400(server: Server) -> None:
    """The rest of the body is left over, and is not a request."""
    body = SHORT | {"prompt": "déjà vu"}
    answer = raw(server, post_bytes(body, length=len(json.dumps(body, ensure_ascii=False))))
    assert b"400 Bad Request" in answer
    assert b"not valid JSON" in answer


@pytest.mark.parametrize(
    "body", [SHORT, SHORT | {"stream": True}], ids=["not streaming", "streaming"]
)
def test_http_1_0_gets_no_chunks_and_a_closed_connection(server: Server, body: dict) -> None:
    content = json.dumps(body | {"temperature": 0}).encode()
    url = urlsplit(server.url)
    with socket.create_connection((url.hostname, url.port), timeout=WAIT) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(content), content)
        )
        head, _, got = connection.makefile("rb").read().partition(b"\r\n\r\n")
    assert b"200 OK" in head
    assert b"transfer-encoding" not in head.lower()
    if not body.get("stream"):
        assert json.loads(got)["choices"]
        return
    modern = server.http.post(COMPLETIONS, json=body | {"temperature": 0})
    texts = [
        [
            json.loads(line[6:])["choices"][0]["text"]
            for line in stream.splitlines()
            if line.startswith(b"data: {")
        ]
        for stream in (got, modern.content)
    ]
    assert got.endswith(b"data: [DONE]\n\n")
    assert "".join(texts[0]) == "".join(texts[1]) != ""


# ---- TLS and Unix sockets


def test_tls_files_that_cannot_be_used_are_named_with_the_reason(tmp_path: Path) -> None:
    identity = trustme.CA().issue_cert("127.0.0.1")
    key, certificate = identity.private_key_pem.bytes(), identity.cert_chain_pems[0].bytes()
    other = trustme.CA().issue_cert("127.0.0.1").private_key_pem.bytes()
    locked = key.replace(b"BEGIN PRIVATE", b"BEGIN ENCRYPTED PRIVATE").replace(
        b"BEGIN EC PRIVATE KEY-----\n",
        b"BEGIN EC PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,00\n\n",
    )
    der = ssl.PEM_cert_to_DER_cert(certificate.decode())
    paths = {name: str(tmp_path / name) for name in ("cert.pem", "key.pem", "ca.pem")}
    settings = {
        "ssl_certfile": paths["cert.pem"],
        "ssl_keyfile": paths["key.pem"],
        "ssl_ca_certs": paths["ca.pem"],
    }
    good = {"cert.pem": certificate, "key.pem": key, "ca.pem": certificate}
    for name, content, flag, reason in (
        ("key.pem", other, "keyfile", "not the key of the first certificate in --ssl-certfile"),
        ("key.pem", locked, "keyfile", "the key is encrypted, .* openssl pkey -in"),
        ("key.pem", key[:80], "keyfile", "the private key in it is damaged"),
        ("key.pem", certificate, "keyfile", "it has a certificate and no private key"),
        ("key.pem", b"sesame", "keyfile", "it has no PEM private key"),
        ("cert.pem", b"hello", "certfile", "begins with a line -----BEGIN CERTIFICATE-----"),
        ("cert.pem", certificate[:200], "certfile", "a certificate in it is damaged"),
        ("cert.pem", key, "certfile", "it has a private key and no certificate"),
        ("cert.pem", der, "certfile", "the binary format DER .* openssl x509 -inform der"),
        ("ca.pem", b"", "ca-certs", "it has no PEM certificate"),
    ):
        for each, given in (good | {name: content}).items():
            (tmp_path / each).write_bytes(given)
        with pytest.raises(ConfigError, match=f"^--ssl-{flag} .*{name} cannot be used: .*{reason}"):
            tls(ServerConfig(**settings))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_tls_accepts_only_clients_with_a_certificate(
    start: Callable[..., Server],
    start_local: Callable[..., Server],
    tmp_path: Path,
    num_workers: int,
) -> None:
    """Uvicorn's own listener, and connections that are handed over to workers, check it."""
    authority, other = trustme.CA(), trustme.CA()
    identity, client = authority.issue_cert("127.0.0.1"), authority.issue_cert("client@example.org")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    identity.private_key_pem.write_to_path(tmp_path / "key.pem")
    identity.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    flags = ("--ssl-keyfile", "key.pem", "--ssl-certfile", "cert.pem", "--ssl-ca-certs", "ca.pem")

    def context(certificate: trustme.LeafCert | None) -> ssl.SSLContext:
        made = ssl.create_default_context()
        authority.configure_trust(made)
        if certificate is not None:
            certificate.configure_cert(made)
        return made

    server = start_local(*flags) if num_workers == 1 else start(*flags, "--api-workers", "2")
    assert server.url.startswith("https://")
    with httpx.Client(base_url=server.url, verify=context(client), timeout=WAIT) as http:
        answer = http.post(COMPLETIONS, json=SHORT)
        assert answer.status_code == 200
        assert "strict-transport-security" in answer.headers
    for certificate in (None, other.issue_cert("client@example.org")):
        with (
            httpx.Client(base_url=server.url, verify=context(certificate), timeout=WAIT) as http,
            pytest.raises(httpx.TransportError),
        ):
            http.get("/health")
    assert "Traceback" not in server.stderr


def test_a_unix_socket_serves_and_is_removed(start: Callable[..., Server], tmp_path: Path) -> None:
    path = tmp_path / "tk.sock"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    server = start("--uds", "tk.sock", "--api-workers", "2")
    assert f"--unix-socket tk.sock {server.url}" in server.curl
    transport = httpx.HTTPTransport(uds=str(path))
    with httpx.Client(base_url=server.url, transport=transport, timeout=20) as http:
        assert http.post(COMPLETIONS, json=SHORT).status_code == 200
        process = Process("serve", "--uds", str(path), cwd=tmp_path)
        assert process.wait() == 2
        assert "--uds" in process.lines[-1]
        process.stop()
        assert http.get("/health").status_code == 200
    server.popen.terminate()
    assert server.wait() == 0
    assert not path.exists()


# ---- systemd and shutdown


@pytest.fixture(scope="module")
def notified() -> Iterator[socket.socket]:
    """The socket that systemd would read."""
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as read,
    ):
        read.bind(f"{folder}/notify")
        read.settimeout(WAIT)
        yield read


@pytest.fixture(scope="module")
def service(
    bare_model: Path, notified: socket.socket, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server as a service of systemd, with uvicorn's log in place of its own."""
    flags = ("--disable-log-requests", "--uvicorn-log-level", "info")
    cwd = tmp_path_factory.mktemp("service")
    server = Server(str(bare_model), *flags, cwd=cwd, NOTIFY_SOCKET=notified.getsockname())
    yield server
    server.stop()


def test_the_log_can_be_without_requests(service: Server) -> None:
    service.http.post(COMPLETIONS, json=SHORT, headers={"X-Request-Id": "order-8"})
    until(lambda: "POST /v1/completions HTTP/1.1" in service.stderr)
    assert "order-8" not in service.stderr


def test_systemd_is_notified_and_a_countdown_logged(
    service: Server, notified: socket.socket
) -> None:
    assert notified.recv(100) == b"READY=1"
    with service.slowly():
        clients = put_under_load(service, 400)
        service.popen.terminate()
        assert notified.recv(100) == b"STOPPING=1"
        until(lambda: "open requests have 120 s" in service.stderr)
        assert service.http.get("/readyz").status_code == 503
        assert service.http.get("/livez").status_code == 200
    for client in clients:
        client.finish()
        assert client.num_tokens == 400
    assert service.wait() == 0
    assert gone(service.core)
    assert service.popen.stdout.read() == ""


# ---- the log


def test_the_log_has_a_line_per_request_and_no_prompt(
    start: Callable[..., Server], model: Path
) -> None:
    server = start("--log-format", "json", model=model)
    secret = "a secret prompt"
    body = {"prompt": secret, "max_tokens": 7, "ignore_eos": True, "n": 2}
    server.http.post(COMPLETIONS, json=body, headers={"X-Request-Id": "order-7"})
    server.http.post(COMPLETIONS, json={"prompt": secret, "n": 0})
    with server.slowly():
        client = Client(server, 8000)
        until(lambda: client.events)
        server.popen.terminate()
        until(lambda: "another signal" in server.stderr)
        server.popen.terminate()
        assert server.wait() == 0
    lines = [json.loads(line) for line in server.stderr.splitlines() if '"path"' in line]
    done, refused, cut = lines
    assert done["request_id"] == "order-7"
    assert (done["status"], done["prompt_tokens"], done["output_tokens"], done["complete"]) == (
        200,
        len(secret),
        14,
        True,
    )
    assert 0 < done["ttft_seconds"] < done["total_seconds"]
    assert done["tpot_seconds"] > 0
    assert refused["status"] == 400
    assert not cut["complete"]
    assert secret not in server.stderr


def test_the_log_can_be_text(limited: Server) -> None:
    headers = {"X-Request-Id": "order-8"} | bearer("c")
    limited.http.post(COMPLETIONS, json=SHORT, headers=headers)
    until(lambda: "order-8" in limited.stderr)
    path = f"{COMPLETIONS}/x%0a12:00:00%20INFO%20forged%1b[2J"
    limited.http.post(path, json=SHORT, headers=bearer("c"))
    until(lambda: "forged" in limited.stderr)
    assert r"/x\n12:00:00 INFO forged\x1b[2J 404" in limited.stderr
    line = next(line for line in limited.lines if "order-8" in line)
    for part in ("200: 2 + 1 tokens", "TTFT", "TPOT", "total"):
        assert part in line


@pytest.mark.parametrize("asked", [{"prompt": [[65]] * 5}, {"prompt": [65], "n": 5}])
def test_a_request_with_more_answers_than_the_limit_is_429(
    guarded: Server, asked: dict[str, object]
) -> None:
    """Three may run and one may wait."""
    refused = guarded.http.post(
        COMPLETIONS, json={"max_tokens": 1} | asked, headers=bearer("first")
    )
    assert error(refused, 429)["code"] == "rate_limit_exceeded"
    fits = {"max_tokens": 1, "prompt": [[65]] * 4}
    answer = guarded.http.post(COMPLETIONS, json=fits, headers=bearer("first"))
    assert len(answer.json()["choices"]) == 4
