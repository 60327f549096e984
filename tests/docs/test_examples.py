"""The examples of the manual run: with a running server, as a server, or as an engine."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.docs.examples import (
    QUESTION,
    directed,
    hearing_server,
    is_invalid_measurement,
    save_model,
    shortened,
    write_certificate,
    write_files,
    write_sound,
)
from tests.hub import Hub, hub_variables
from tests.local import LocalServer
from tests.records import server_of
from tests.server import WAIT, Server
from toolkit.bench import search
from toolkit.demo import MODEL_DIR
from tools.docs.prose import PROSE

LINES = [
    line for prose in PROSE.values() for _, lines in prose.examples for line in lines.split("\n")
]
HUB = ("tk pull", "tk show", "tk rm", "--dry-run")
"""Examples that look for models: gpt2 is on a local hub, another one in ./model."""
SERVERS = [
    line for line in LINES if "tk serve" in line and "--dry-run" not in line and line != "tk serve"
]
"""`tk serve` alone is the server that other examples use."""
ENGINES = [
    line for line in LINES if re.search("tk (run|bench (offline|throughput|latency|prefill))", line)
]
SPEECH = [line for line in LINES if line.startswith("tk transcribe")]
OTHERS = [line for line in LINES if line not in SERVERS + ENGINES + SPEECH and line != "tk serve"]
SHELL = re.compile(r"^(?!tk )|[|&<~]|^tk man")
"""Examples for a shell; `tk man` replaces its process. The others run in this process: faster."""
SHORT = {
    "TK_REPEATS": "1",
    "TK_MIN_LEN": "4",
    "TK_MAX_LEN": "8",
    "TK_OUTPUT_LEN": "8",
    "TK_BATCH_SIZES": "1",
    "TK_NUM_PROMPTS": "4",
    "TK_NUM_REQUESTS": "2",
}
SEARCH = {
    "TK_REQUEST_RATE": "64",
    "TK_DURATION": "0.2",
    "TK_GOODPUT_RATIO": "0.5",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the demo model."""
    running = LocalServer(cwd=tmp_path_factory.mktemp("server"))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    """A hub with the demo model under the name gpt2."""
    hub = Hub()
    hub.add("gpt2", Path(MODEL_DIR))
    yield hub
    hub.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with gpt2's context length."""
    folder = tmp_path_factory.mktemp("models") / "gpt2"
    save_model(folder)
    return folder


def save_results(tk_here: Callable, server: Server, folder: Path) -> None:
    """Write results to compare, of a small run with a closed loop."""
    flags = (
        "--num-prompts 8 --max-concurrency 2 --random-output-len 4 --result-filename before.json"
    )
    tk_here("bench", *flags.split(), "--result-dir", str(folder), cwd=folder, TK_URL=server.url)
    result = json.loads((folder / "before.json").read_text())
    result["client"]["saturated"] = None  # a slow machine's result can be compared, too
    for name in ("before.json", "after.json"):
        (folder / name).write_text(json.dumps(result))


@pytest.fixture
def folder(tmp_path: Path, model: Path) -> Path:
    """A folder with the models and files that examples name."""
    for name in ("gpt2", "model"):
        (tmp_path / name).symlink_to(model)
    (tmp_path / "models").mkdir()
    write_files(tmp_path)
    return tmp_path


@pytest.fixture
def environment(server: Server, folder: Path) -> dict[str, str]:
    """Environment of examples that use the server."""
    settings = {"TK_URL": server.url, "TK_RANDOM_OUTPUT_LEN": "8", "TK_INTERVAL": "0.1"}
    return {"HOME": str(folder), **settings}


@pytest.mark.usefixtures("frozen_heap", "one_probe")
@pytest.mark.parametrize(
    "line",
    [line for line in OTHERS if not SHELL.search(line) and not any(part in line for part in HUB)],
)
def test_example_runs(
    line: str,
    server: Server,
    folder: Path,
    environment: dict[str, str],
    tk_here: Callable,
    monkeypatch: pytest.MonkeyPatch,
):
    if "--find-max-rps" in line:
        environment |= SEARCH
        monkeypatch.setattr(search, "PRECISION", 2.0)
    if "before.json" in line:
        save_results(tk_here, server, folder)
    _, *words = shlex.split(directed(line, server))
    with server_of(line, folder):
        done = tk_here(*words, stdin=QUESTION, cwd=folder, **environment)
    assert done.returncode == 0 or ("bench" in line and is_invalid_measurement(done)), done.stderr
    assert done.stdout


@pytest.mark.parametrize("line", [line for line in OTHERS if any(part in line for part in HUB)])
def test_example_finds_models(
    line: str, hub: Hub, folder: Path, environment: dict[str, str], tk_here: Callable
):
    (folder / "gpt2").unlink()
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hf")}
    with hub_variables(environment):
        if "tk rm" in line:
            tk_here("pull", "gpt2", cwd=folder, **environment)
        done = tk_here(*shlex.split(line)[1:], cwd=folder, **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout or "Removed" in done.stderr


@pytest.mark.parametrize("line", [line for line in OTHERS if SHELL.search(line)])
def test_example_runs_in_a_shell(
    line: str, server: Server, folder: Path, environment: dict[str, str], programs: Path
):
    environment |= {"PATH": f"{programs}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", directed(line, server)], input=QUESTION, cwd=folder,
        env=os.environ | environment,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout or "source" in line


def test_examples_transcribe(tmp_path: Path, tk_here: Callable):
    write_sound(tmp_path)
    with hearing_server() as server:
        for line in SPEECH:
            done = tk_here(*shlex.split(line)[1:], cwd=tmp_path, TK_URL=server.url)
            assert done.returncode == 0, done.stderr
            assert done.stdout
    assert (tmp_path / "subtitles" / "call.srt").is_file()


@pytest.mark.parametrize("line", ENGINES)
def test_example_runs_an_engine(line: str, folder: Path, tk_here: Callable):
    words = shlex.split(shortened(line))
    stdin = (folder / "notes.txt").read_text() if "cat" in line else ""
    environment = SHORT | {"HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    done = tk_here(*words[words.index("tk") + 1 :], stdin=stdin, cwd=folder, **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("line", SERVERS)
def test_example_serves(line: str, folder: Path):
    if "cert.pem" in line:
        write_certificate(folder)
    words = shlex.split(shortened(line))
    start = words.index("tk")
    environment = dict(word.split("=", 1) for word in words[:start])
    server = LocalServer(*words[start + 2 :], cwd=folder, **environment)
    try:
        key = {"Authorization": "Bearer a-key"}
        card = httpx.get(f"{server.url}/v1/models", headers=key, verify=False, timeout=WAIT)
        [model] = card.raise_for_status().json()["data"]
        assert (model["id"], model["max_model_len"]) in {("gpt2", 512), ("model", 1024)}
    finally:
        server.stop()
