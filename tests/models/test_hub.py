"""Models from a hub: a small one on this machine that speaks as the real one does, asked by a fresh process each time."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from tests import checkpoints


class Hub:
    """Repositories by name and revision; what was asked for is in `requests`."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.gated: set[str] = set()
        self.private: dict[str, str] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        self.broken = False
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET  # noqa: N815  # the base class asks for these names

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def add(self, name: str, folder: Path, revision: str = "main", **more: bytes) -> None:
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        files |= {"README.md": b"# A model", ".gitattributes": b"", "onnx/model.onnx": b"not for us"}
        self.repos.setdefault(name, {})[revision] = files | more

    def asked_for(self, word: str) -> list[str]:
        return [path for _, path, _ in self.requests if word in path]

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        token = request.headers.get("Authorization")
        self.requests.append((request.command, path, token))
        if self.broken:
            return self.reply(request, 503, {}, b"the hub is being mended")
        parts = path.strip("/").split("/")
        name = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        revision = (
            parts[5] if parts[0] == "api" and len(parts) > 5 else parts[3] if parts[0] != "api" else "main"
        )
        repo = self.repos.get(name)
        if repo is None or (name in self.private and token != f"Bearer {self.private[name]}"):
            return self.reply(request, 401, {"X-Error-Code": "RepoNotFound"}, b"{}")
        if name in self.gated and parts[0] != "api":
            return self.reply(request, 403, {"X-Error-Code": "GatedRepo"}, b"{}")
        commits = {commit_of(name, known): known for known in repo}
        revision = commits.get(revision, revision)
        if revision not in repo:
            return self.reply(request, 404, {"X-Error-Code": "RevisionNotFound"}, b"{}")
        commit, files = commit_of(name, revision), repo[revision]
        if parts[0] == "api":
            if "tree" in parts:
                listing: object = [
                    {"type": "file", "path": f, "size": len(c), "oid": hashlib.sha1(c).hexdigest()}
                    for f, c in files.items()
                ]
            else:
                listing = {
                    "id": name, "modelId": name, "sha": commit, "private": False, "tags": [], "downloads": 0,
                    "likes": 0, "siblings": [{"rfilename": file} for file in files],
                }  # fmt: skip
            return self.reply(
                request, 200, {"Content-Type": "application/json"}, json.dumps(listing).encode()
            )
        content = files.get("/".join(parts[4:]))
        if content is None:
            return self.reply(request, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b"")
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        return self.reply(request, 200, {"ETag": etag, "X-Repo-Commit": commit}, content)

    def reply(self, request: BaseHTTPRequestHandler, code: int, headers: dict[str, str], body: bytes) -> None:
        request.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def commit_of(name: str, revision: str) -> str:
    return hashlib.sha1(f"{name}@{revision}".encode()).hexdigest()


@pytest.fixture
def hub(checkpoint: Callable[[str], Path]) -> Iterator[Hub]:
    hub = Hub()
    hub.add("org/tiny", checkpoint("gpt2"))
    yield hub
    hub.close()


@pytest.fixture
def ask(hub: Hub, tmp_path: Path) -> Callable[..., str]:
    """Runs `expression` in a process whose hub is ours and whose cache is empty at first; the last line it prints."""

    def run(expression: str, **environment: str) -> str:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HOME": str(tmp_path)}
        code = (
            "import pathlib, sys, types, toolkit\n"
            "if not sys.argv[1:]:  # without the package's own imports: torch takes seconds\n"
            "    sys.modules['toolkit.models'] = package = types.ModuleType('toolkit.models')\n"
            "    package.__path__ = [str(pathlib.Path(toolkit.__file__).parent / 'models')]\n"
            "else:\n"
            "    from toolkit import LLM, SamplingParams\n"
            "from toolkit.models.hub import locate, locate_tokenizer\n"
            "from toolkit.errors import ToolkitError\n"
            f"try:\n    print({expression})\n"
            "except ToolkitError as error:\n    print(type(error).__name__ + ': ' + error.message)\n"
        )
        arguments = ["heavy"] if "LLM" in expression else []
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], env=kept | settings | environment, capture_output=True, text=True,
            cwd=tmp_path, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert len(lines) == 1, done.stdout
        return lines[0]

    return run


RUN = (
    "LLM('org/tiny', device='cpu', max_num_seqs=2).generate([[1, 2, 3]], "
    "SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0].outputs[0].token_ids"
)


def test_a_model_is_fetched_and_run_and_afterwards_needs_no_hub(hub, ask):
    expected = str(checkpoints.greedy(checkpoints.make_reference("gpt2"), [1, 2, 3], 8))
    assert ask(RUN) == expected
    assert hub.asked_for("model.safetensors")
    count = len(hub.requests)
    assert ask(RUN, HF_HUB_OFFLINE="1") == expected
    assert len(hub.requests) == count


def test_what_is_fetched_has_the_files_that_were_served(hub, ask, checkpoint):
    folder = Path(ask("locate('org/tiny')"))
    source = checkpoint("gpt2")
    assert (folder / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert {path.name for path in folder.iterdir()} == {path.name for path in source.iterdir()}
    assert not hub.asked_for("onnx")
    assert folder.name == commit_of("org/tiny", "main")


def test_a_second_time_no_file_is_fetched_again(hub, ask):
    first = ask("locate('org/tiny')")
    hub.requests.clear()
    assert ask("locate('org/tiny')") == first
    assert not [request for request in hub.requests if request[0] == "GET" and "/resolve/" in request[1]]


def test_another_revision(hub, ask, checkpoint):
    hub.add("org/tiny", checkpoint("llama3-gqa"), revision="v2")
    folders = [Path(ask(f"locate('org/tiny', {revision!r})")) for revision in ("v2", None)]
    kinds = [json.loads((folder / "config.json").read_text())["model_type"] for folder in folders]
    assert kinds == ["llama", "gpt2"]
    assert ask("locate('org/tiny', 'v2')", HF_HUB_OFFLINE="1") == str(folders[0])


def test_a_revision_that_is_not_there(hub, ask):
    answer = ask("locate('org/tiny', 'v9')")
    assert answer == "ModelNotFoundError: org/tiny has no revision 'v9' on the hub."


def test_a_name_that_is_not_there_gets_the_nearest_cached_ones(hub, ask):
    ask("locate('org/tiny')")
    answer = ask("locate('org/tny')")
    assert answer.startswith("ModelNotFoundError: There is no model org/tny")
    assert "the hub does not have it" in answer
    assert "HF_TOKEN" in answer
    assert answer.endswith("Did you mean org/tiny?")


def test_offline_a_name_that_is_not_cached_tells_what_was_searched(hub, ask, tmp_path):
    answer = ask("locate('org/tiny')", HF_HUB_OFFLINE="1")
    assert "ModelNotFoundError" in answer
    assert "HF_HUB_OFFLINE is set" in answer
    assert str(tmp_path / "hf") in answer
    assert not hub.requests


def test_a_gated_model_asks_for_a_token(hub, ask, checkpoint):
    hub.add("org/locked", checkpoint("gpt2"))
    hub.gated.add("org/locked")
    answer = ask("locate('org/locked')")
    assert answer.startswith("ModelNotFoundError: org/locked is a gated model")
    assert "HF_TOKEN" in answer


def test_the_token_is_sent(hub, ask, checkpoint):
    hub.add("org/secret", checkpoint("gpt2"))
    hub.private["org/secret"] = "hf_of_mine"
    assert "ModelNotFoundError" in ask("locate('org/secret')")
    folder = ask("locate('org/secret')", HF_TOKEN="hf_of_mine")
    assert (Path(folder) / "model.safetensors").is_file()


def test_when_the_hub_is_down_the_cache_serves(hub, ask):
    first = ask("locate('org/tiny')")
    hub.broken = True
    assert ask("locate('org/tiny')") == first
    answer = ask("locate('org/other')")
    assert answer.startswith("ModelNotFoundError: There is no model org/other")
    assert "the hub did not answer" in answer
    hub.close()  # and now nobody listens
    assert ask("locate('org/tiny')") == first


def test_of_two_kinds_of_weights_only_safetensors_are_fetched(hub, ask, checkpoint):
    hub.add("org/both", checkpoint("gpt2"), **{"pytorch_model.bin": b"x" * 1000, "tf_model.h5": b"x"})
    folder = Path(ask("locate('org/both')"))
    assert (folder / "model.safetensors").is_file()
    assert not hub.asked_for("pytorch_model.bin")
    assert not hub.asked_for("tf_model.h5")
    assert ask("locate('org/both')", HF_HUB_OFFLINE="1") == str(folder)


def test_weights_of_the_old_kind_are_fetched_when_there_are_no_others(hub, ask, checkpoint, tmp_path):
    folder = tmp_path / "old"
    checkpoints.save(checkpoints.make_reference("gpt2"), folder)
    (folder / "model.safetensors").unlink()
    torch.save({"x": torch.ones(1)}, folder / "pytorch_model.bin")
    hub.add("org/old", folder)
    fetched = ask("locate('org/old')")
    assert (Path(fetched) / "pytorch_model.bin").is_file()
    assert ask("locate('org/old')", HF_HUB_OFFLINE="1") == fetched


def test_a_download_that_was_interrupted_is_no_model(hub, ask, tmp_path):
    folder = Path(ask("locate('org/tiny')"))
    (folder / "model.safetensors").unlink()
    assert "it is not in the cache" in ask("locate('org/tiny')", HF_HUB_OFFLINE="1")


def test_of_a_tokenizer_no_weights_are_fetched(hub, ask):
    folder = Path(ask("locate_tokenizer('org/tiny')"))
    assert (folder / "tokenizer.json").is_file()
    assert not hub.asked_for("model.safetensors")
    hub.broken = True
    assert ask("locate_tokenizer('org/tiny')") == str(folder)
    assert "There is no folder ./nowhere/at/all" in ask("locate_tokenizer('./nowhere/at/all')")
