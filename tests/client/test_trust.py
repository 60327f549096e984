"""TLS of the clients: chat, dashboard and load generator."""

from __future__ import annotations

import http.server
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import trustme

from toolkit.client.trust import Trust, why_untrusted
from toolkit.errors import ConfigError

COMMANDS = (
    ("chat", "--model", "m", "Hi"),
    ("top", "--once"),
    ("bench", "--num-prompts", "1", "--num-warmups", "0"),
)


class Handler(http.server.BaseHTTPRequestHandler):
    """Lists a model; refuses all else."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "m"}]}).encode()
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def ca(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ca") / "ca.pem"
    authority.cert_pem.write_to_path(path)
    return path


@pytest.fixture(scope="module")
def url(authority: trustme.CA) -> Iterator[str]:
    """Address of a server whose certificate no system trusts."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.handle_error = lambda *_: None  # type: ignore[method-assign]  # refused handshakes
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"https://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("command", COMMANDS, ids=[words[0] for words in COMMANDS])
@pytest.mark.parametrize("trust", ["none", "--cacert", "--insecure", "SSL_CERT_FILE"])
def test_commands_trust_what_they_are_told_to(
    tk_here: Callable,
    url: str,
    ca: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    trust: str,
):
    """A trusted server gets the request, and answers with 404."""
    name, *rest = command
    more = {"--cacert": [trust, str(ca)], "--insecure": [trust]}.get(trust, [])
    if trust == "SSL_CERT_FILE":
        monkeypatch.setenv(trust, str(ca))
    done = tk_here(name, *rest, "--url", url, *more)
    output = done.stdout + done.stderr
    problem = f"{url} answers, but its certificate is not trusted: unable to get local issuer"
    assert (problem in output) == (trust == "none"), output
    assert ("404" in output.replace(url, "")) == (trust != "none")
    if trust == "none":
        assert "--cacert FILE (or SSL_CERT_FILE)" in output
        assert "--insecure" in output


def test_certificate_of_another_host_is_not_trusted(url: str, ca: Path):
    other = url.replace("127.0.0.1", "localhost")
    with httpx.Client(verify=Trust(str(ca)).context()) as client:
        with pytest.raises(httpx.ConnectError) as caught:
            client.get(other)
        assert "Hostname mismatch" in (why_untrusted(caught.value) or "")


def test_unusable_cacert_is_an_error(tmp_path: Path):
    (tmp_path / "empty.pem").touch()
    for name, reason in (("missing", "No such file or directory"), ("empty", "it has no PEM cert")):
        path = tmp_path / f"{name}.pem"
        with pytest.raises(ConfigError, match=rf"--cacert {path} cannot be used: {reason}"):
            Trust(str(path)).context()
    with pytest.raises(ConfigError, match="--insecure accepts any certificate"):
        Trust("ca.pem", insecure=True)
