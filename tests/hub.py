"""A local model hub with the protocol of the real one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants, hf_api
from huggingface_hub.utils import _cache_manager


class Hub:
    """Repositories by name and revision. `requests` and `ranges` list what was requested."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.gated: set[str] = set()
        self.private: dict[str, str] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        self.ranges: list[tuple[str, str]] = []
        self.broken = False
        self.cut: int | None = None
        """Bytes after which the next longer response breaks off, once."""
        self.held: threading.Event | None = None
        """Event before which large files are sent only to one half."""
        self.failing: set[str] = set()  # files that the hub has and cannot send
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET  # noqa: N815  # name of the base class

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=[0.01], daemon=True).start()

    def add(self, name: str, folder: Path, revision: str = "main", **more: bytes) -> None:
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        files |= {
            "README.md": b"# A model",
            ".gitattributes": b"",
            "onnx/model.onnx": b"not needed",
        }
        self.repos.setdefault(name, {})[revision] = files | more

    def asked_for(self, word: str) -> list[str]:
        return [path for _, path, _ in self.requests if word in path]

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        token = request.headers.get("Authorization")
        self.requests.append((request.command, path, token))
        if self.broken:
            return self.reply(request, 503, {}, b"the hub is down")
        parts = path.strip("/").split("/")
        is_api = parts[0] == "api"
        rest = parts[2:] if is_api else parts
        name = rest[0] if rest and rest[0] in self.repos else "/".join(rest[:2])
        # resolve/main/config.json, revision/main, tree/main, ...
        rest = rest[name.count("/") + 1 :]
        revision = rest[1] if len(rest) > 1 else "main"
        repo = self.repos.get(name)
        if repo is None or (name in self.private and token != f"Bearer {self.private[name]}"):
            return self.reply(request, 401, {"X-Error-Code": "RepoNotFound"}, b"{}")
        if name in self.gated and not is_api:
            return self.reply(request, 403, {"X-Error-Code": "GatedRepo"}, b"{}")
        commits = {commit_of(name, known): known for known in repo}
        revision = commits.get(revision, revision)
        if revision not in repo:
            return self.reply(request, 404, {"X-Error-Code": "RevisionNotFound"}, b"{}")
        commit, files = commit_of(name, revision), repo[revision]
        if is_api:
            if "tree" in rest:
                listing: object = [
                    {"type": "file", "path": f, "size": len(c), "oid": hashlib.sha1(c).hexdigest()}
                    for f, c in files.items()
                ]
            else:
                siblings = [{"rfilename": f, "size": len(c)} for f, c in files.items()]
                listing = {
                    "id": name,
                    "modelId": name,
                    "sha": commit,
                    "private": False,
                    "tags": [],
                    "downloads": 0,
                    "likes": 0,
                    "siblings": siblings,
                }
            return self.reply(
                request, 200, {"Content-Type": "application/json"}, json.dumps(listing).encode()
            )
        if parts[-1] in self.failing:
            return self.reply(request, 410, {}, b"")
        content = files.get("/".join(rest[2:]))
        if content is None:
            return self.reply(
                request, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b""
            )
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": commit}
        return self.send(request, path, headers, content)

    def send(
        self, request: BaseHTTPRequestHandler, path: str, headers: dict[str, str], content: bytes
    ) -> None:
        """Send a file, or the requested range of it (RFC 9110, section 14)."""
        range_ = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
        if range_ is None:
            return self.reply(request, 200, headers, content)
        self.ranges.append((path, request.headers["Range"]))
        first, last = int(range_[1]), min(int(range_[2] or len(content) - 1), len(content) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        return self.reply(request, 206, headers, content[first : last + 1])

    def reply(
        self, request: BaseHTTPRequestHandler, code: int, headers: dict[str, str], body: bytes
    ) -> None:
        request.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command == "HEAD":
            return
        if self.cut is not None and len(body) > self.cut:
            request.close_connection = True
            body, self.cut = body[: self.cut], None
        if self.held is not None and len(body) > 2**20:
            request.wfile.write(body[: len(body) // 2])
            body = body[len(body) // 2 :]
            self.held.wait(60.0)
        with contextlib.suppress(ConnectionError):  # the client may have disconnected
            request.wfile.write(body)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def commit_of(name: str, revision: str) -> str:
    return hashlib.sha1(f"{name}@{revision}".encode()).hexdigest()


@contextlib.contextmanager
def hub_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Apply variables to the hub's library, which reads them only when it is imported."""
    endpoint, home = variables["HF_ENDPOINT"], Path(variables["HF_HOME"])
    offline = variables.get("HF_HUB_OFFLINE", "0") == "1"
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("HF_")]:
            patch.delenv(name)
        patch.setattr(hf_api.api, "endpoint", endpoint)
        patch.setattr(_cache_manager, "HF_HUB_CACHE", str(home / "hub"))
        for name, value in (
            ("ENDPOINT", endpoint),
            ("HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"),
            ("HF_HOME", str(home)),
            ("HF_HUB_CACHE", str(home / "hub")),
            ("HUGGINGFACE_HUB_CACHE", str(home / "hub")),
            ("HF_TOKEN_PATH", str(home / "token")),
            ("HF_XET_CACHE", str(home / "xet")),
            ("HF_HUB_OFFLINE", offline),
        ):
            assert hasattr(constants, name)
            patch.setattr(constants, name, value)
        yield
