"""Adapters that are loaded and unloaded while the server runs, with two API workers."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.lora.conftest import Adapter
from tests.lora.test_server import COUNT, TEXT, text
from tests.server import Server, until

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def adapters(adapter) -> dict[str, Adapter]:
    return {name: adapter(name) for name in ("attention", "all", "patterns")}


@pytest.fixture(scope="module")
def folder(adapters, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for name in ("attention", "all"):
        shutil.copytree(adapters[name].folder, folder / name)
    return folder


@pytest.fixture(scope="module")
def server(adapters, checkpoint, folder, tmp_path_factory) -> Iterator[Server]:
    server = Server(
        str(checkpoint("llama3-gqa")),
        *("--served-model-name", "base", "--dtype", "float32"),
        *("--lora-dir", str(folder), "--lora-modules", f"patterns={adapters['patterns'].folder}"),
        *("--allow-runtime-lora", "--api-workers", "2", "--max-loras", "2"),
        *("--admin-key", "operator"),
        cwd=tmp_path_factory.mktemp("server"),
    )
    yield server
    server.stop()


class Caller:
    """Calls the server over new connections, which go to the workers in turn."""

    def __init__(self, server: Server) -> None:
        self._url = server.url

    def admin(self, path: str, **body: object) -> tuple[int, dict]:
        headers = {"Authorization": "Bearer operator"}
        answer = httpx.post(self._url + path, json=body, headers=headers, timeout=60)
        return answer.status_code, answer.json()

    def models(self) -> set[str]:
        return {one["id"] for one in httpx.get(f"{self._url}/v1/models").json()["data"]}

    def answer(self, model: str) -> str:
        body = {
            "model": model,
            "prompt": TEXT,
            "max_tokens": COUNT,
            "temperature": 0,
            "ignore_eos": True,
        }
        answer = httpx.post(f"{self._url}/v1/completions", json=body, timeout=60)
        if answer.status_code != 200:
            return str(answer.json()["error"]["message"])
        return str(answer.json()["choices"][0]["text"])


@pytest.fixture
def caller(server) -> Caller:
    return Caller(server)


def test_folders_of_the_directory_are_models(caller, adapters):
    for name in ("attention", "all", "patterns"):
        assert caller.answer(name) == text(adapters[name].model)
    assert {"base", "attention", "all", "patterns"} <= caller.models()
    assert "is not served here" in caller.answer("../attention")


def test_the_ready_card_names_adapters(server):
    assert re.search(r"adapters +patterns; ranks of up to 16", "".join(server.lines))


def test_all_workers_serve_what_one_has_loaded(caller, adapters, folder):
    status, answer = caller.admin(LOAD, lora_name="new", lora_path="all")
    assert (status, answer) == (
        200,
        {"id": "new", "root": str(folder / "all"), "status": "loaded"},
    )
    for _ in range(4):
        assert "new" in caller.models()
        assert caller.answer("new") == text(adapters["all"].model)
    assert caller.admin(LOAD, lora_name="new", lora_path="all")[1]["status"] == "unchanged"
    assert caller.admin(UNLOAD, lora_name="new")[1]["status"] == "unloaded"
    for _ in range(4):
        assert "new" not in caller.models()
        assert "'new' was unloaded" in caller.answer("new")


def test_names_get_new_revisions_under_load(server, caller, adapters, folder):
    """Requests of other names are answered as before, and no request fails."""
    shutil.copytree(adapters["attention"].folder, folder / "changing")
    assert caller.admin(LOAD, lora_name="changing", lora_path="changing")[0] == 200
    expected = {text(adapters[name].model) for name in ("attention", "all")}
    found: list[tuple[str, str]] = []
    stop = threading.Event()

    def ask(name: str) -> None:
        while not stop.is_set():
            found.append((name, Caller(server).answer(name)))

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("changing", "patterns")]
    for thread in threads:
        thread.start()
    until(lambda: len(found) > 6)
    for name in ("all", "attention", "all"):
        for file in (folder / name).iterdir():
            shutil.copy(file, folder / "changing")
        assert caller.admin(LOAD, lora_name="changing", lora_path="changing")[0] == 200
        assert caller.answer("changing") == text(adapters[name].model)
    stop.set()
    for thread in threads:
        thread.join()
    assert {answer for name, answer in found if name == "changing"} <= expected
    patterns = {answer for name, answer in found if name == "patterns"}
    assert patterns == {text(adapters["patterns"].model)}
    assert len({answer for name, answer in found if name == "changing"}) == 2


REFUSED = {
    "no adapter": ({"lora_name": "x", "lora_path": "absent"}, 404, "there is no such folder"),
    "outside": ({"lora_name": "x", "lora_path": "/etc"}, 400, "must be inside"),
    "above": ({"lora_name": "x", "lora_path": "../.."}, 400, "must be inside"),
    "name of the model": (
        {"lora_name": "base", "lora_path": "all"},
        400,
        "The model itself is called 'base'",
    ),
    "name in use": (
        {"lora_name": "patterns", "lora_path": "all", "load_inplace": False},
        400,
        "There is an adapter 'patterns'",
    ),
    "no path": ({"lora_name": "x"}, 400, "lora_path"),
    "strange name": ({"lora_name": "a\nb", "lora_path": "all"}, 400, "printable"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_operations_change_nothing(server, caller, adapters, case):
    body, status, says = REFUSED[case]
    before = caller.models()
    got, answer = caller.admin(LOAD, **body)
    assert got == status
    assert says in answer["error"]["message"]
    assert caller.models() == before
    assert caller.answer("patterns") == text(adapters["patterns"].model)
    if case == "outside":
        until(lambda: "adapter 'x': not loaded: lora_path '/etc'" in "".join(server.lines))
        until(lambda: " patterns /v1/completions 200" in "".join(server.lines))


def test_operations_need_the_admin_key_and_a_known_name(server, caller):
    body = {"lora_name": "x", "lora_path": "all"}
    for key in ({}, {"Authorization": "Bearer other"}):
        assert server.http.post(LOAD, json=body, headers=key).status_code in (401, 403)
    status, answer = caller.admin(UNLOAD, lora_name="never")
    assert status == 404
    assert "no adapter 'never'" in answer["error"]["message"]


def test_adapters_survive_their_core_and_their_worker(server, caller, adapters, folder):
    assert caller.admin(LOAD, lora_name="kept", lora_path="attention")[0] == 200
    [core] = server.cores
    core.kill()
    for _ in range(2):
        assert caller.answer("kept") == text(adapters["attention"].model)
    worker = server.workers[0]
    worker.kill()
    until(lambda: len(server.workers) == 2 and worker not in server.workers)

    def is_idle() -> bool:
        with suppress(httpx.TransportError):  # a connection that the killed worker had accepted
            return server.metric("tk:num_requests_running") == 0
        return False

    until(is_idle)
    for _ in range(4):
        assert caller.answer("kept") == text(adapters["attention"].model)


def test_metrics_count_requests_by_adapter(server, caller):
    caller.answer("patterns")
    labels = {"lora_name": "patterns"}
    until(lambda: server.metric("tk:lora_requests_running", **labels) == 0)
    scraped = server.http.get("/metrics").text
    assert 'tk:lora_requests_info{engine="0",max_lora="2",model_name="base"' in scraped
