"""The examples of the manual do what they say: against a server that runs, as a server, or on an engine of their own."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad

from tests.checkpoints import edit_json
from tests.hub import Hub
from tests.server import WAIT, Server
from toolkit.demo import MODEL_DIR
from tools.docs.prose import PROSE

LINES = [
    line for prose in PROSE.values() for _, lines in prose.examples for line in lines.split("\n")
]
HUB = ("tk pull", "tk show", "tk rm", "--dry-run")
"""Examples with these find models here: gpt2 on a hub of this machine, and one in ./model."""
SERVERS = [
    line for line in LINES if "tk serve" in line and "--dry-run" not in line and line != "tk serve"
]
"""`tk serve` alone is the server that others are run against."""
ENGINES = [line for line in LINES if re.search("tk (run|bench (offline|latency|prefill))", line)]
OTHERS = [line for line in LINES if line not in SERVERS + ENGINES and line != "tk serve"]
SHELL = re.compile(r"^(?!tk )|[|&<~]|^tk man")
"""Examples that need one, or become another program. The others run in this process, where everything is imported already."""
QUICK = {
    "--duration 10": "--duration 1",
    "--num-prompts 64": "--num-prompts 8",
    "--num-prompts 20": "--num-prompts 6",
    "--num-prompts 12": "--num-prompts 4",
    "rps=2,4": "rps=8,16",
    "0.0.0.0": "127.0.0.1",
}
"""What is put in the place of what would only take time, or open this machine to others."""
SHORT = {
    "TK_REPEATS": "1",
    "TK_MIN_LEN": "4",
    "TK_MAX_LEN": "8",
    "TK_OUTPUT_LEN": "8",
    "TK_BATCH_SIZES": "1",
    "TK_NUM_PROMPTS": "4",
}
SEARCH = {
    "TK_REQUEST_RATE": "16",
    "TK_DURATION": "0.6",
    "TK_GOODPUT_RATIO": "0.5",
}
TRACE = [{"timestamp": 50 * i, "input_length": 16 + i, "output_length": 4} for i in range(5)]
QUESTION = "What is a KV cache?"
IN_VAIN = ("SATURATED", "none came in")
"""What a slow machine may end a measurement with."""
CERTIFICATE = "openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 2 -subj /CN=localhost"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It serves the demo model."""
    running = Server(cwd=tmp_path_factory.mktemp("server"))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    """It has the demo model, as gpt2."""
    hub = Hub()
    hub.add("gpt2", Path(MODEL_DIR))
    yield hub
    hub.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with a context as long as that of gpt2."""
    folder = tmp_path_factory.mktemp("models") / "gpt2"
    shutil.copytree(MODEL_DIR, folder)
    weights = load_file(folder / "model.safetensors")
    [positions] = [name for name in weights if name.endswith("wpe.weight")]
    weights[positions] = pad(weights[positions], (0, 0, 0, 1024 - len(weights[positions])))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    edit_json(folder / "config.json", n_positions=1024)
    edit_json(folder / "tokenizer_config.json", model_max_length=1024)
    return folder


@pytest.fixture(scope="module")
def result(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a small run, closed so that no client can be too slow for it."""
    folder = tmp_path_factory.mktemp("results")
    flags = f"--url {server.url} --num-prompts 8 --max-concurrency 2 --random-output-len 4 --result-dir {folder}"
    command = [
        sys.executable,
        "-m",
        "toolkit",
        "bench",
        *flags.split(),
        "--result-filename",
        "measured.json",
    ]
    subprocess.run(command, capture_output=True, timeout=60, check=True)
    return folder / "measured.json"


@pytest.fixture
def folder(tmp_path: Path, model: Path) -> Path:
    """Where an example runs: with the files that examples name."""
    for name in ("gpt2", "model"):
        (tmp_path / name).symlink_to(model)
    (tmp_path / "models").mkdir()
    (tmp_path / "notes.txt").write_text(QUESTION)
    (tmp_path / "keys.txt").write_text("a-key")
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in TRACE))
    return tmp_path


def shortened(line: str) -> str:
    for long, short in QUICK.items():
        line = line.replace(long, short)
    return line


@pytest.fixture
def environment(server: Server, folder: Path) -> dict[str, str]:
    """Of examples that ask a server."""
    return {"HOME": str(folder), "TK_URL": server.url, "TK_RANDOM_OUTPUT_LEN": "8"}


def directed(line: str, server: Server) -> str:
    """To the server that runs, and so that it takes no longer than it must."""
    return (
        shortened(line)
        .replace("http://127.0.0.1:8000", server.url)
        .replace("127.0.0.1:8000", server.url)
    )


def told_in_vain(done: subprocess.CompletedProcess[str]) -> bool:
    return done.returncode == 1 and any(reason in done.stdout + done.stderr for reason in IN_VAIN)


@pytest.mark.parametrize(
    "line",
    [line for line in OTHERS if not SHELL.search(line) and not any(part in line for part in HUB)],
)
def test_it_runs(
    line: str,
    server: Server,
    result: Path,
    folder: Path,
    environment: dict[str, str],
    tk_here: Callable,
):
    if "--find-max-rps" in line:
        environment |= SEARCH
    if "before.json" in line:
        shutil.copy(result, folder / "before.json")
        shutil.copy(result, folder / "after.json")
    _, *words = shlex.split(directed(line, server))
    done = tk_here(*words, stdin=QUESTION, cwd=folder, **environment)
    assert done.returncode == 0 or ("bench" in line and told_in_vain(done)), done.stderr
    assert done.stdout


@pytest.mark.parametrize(
    "line", [line for line in OTHERS if SHELL.search(line) or any(part in line for part in HUB)]
)
def test_it_runs_in_a_shell(
    line: str, server: Server, hub: Hub, folder: Path, environment: dict[str, str]
):
    """Examples with more than one command, and those of the hub, whose address is read when a process begins."""
    tk = folder / "bin" / "tk"
    tk.parent.mkdir()
    tk.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m toolkit "$@"\n')
    tk.chmod(0o755)
    environment |= {"PATH": f"{tk.parent}:{os.environ['PATH']}"}
    if any(part in line for part in HUB):
        (folder / "gpt2").unlink()
        environment |= {
            "HF_ENDPOINT": hub.url,
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(folder / "hf"),
        }
    command = f"tk pull gpt2 && {line}" if "tk rm" in line else directed(line, server)
    done = subprocess.run(
        ["bash", "-c", command], input=QUESTION, cwd=folder, env=os.environ | environment,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout or "source" in line


@pytest.mark.parametrize("line", ENGINES)
def test_it_runs_an_engine(line: str, folder: Path, tk_here: Callable):
    words = shlex.split(shortened(line))
    stdin = (folder / "notes.txt").read_text() if "cat" in line else ""
    environment = SHORT | {"HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    done = tk_here(*words[words.index("tk") + 1 :], stdin=stdin, cwd=folder, **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("line", SERVERS)
def test_it_serves_until_it_is_told_to_end(line: str, folder: Path):
    if "cert.pem" in line:
        subprocess.run(CERTIFICATE.split(), cwd=folder, capture_output=True, check=True)
    words = shlex.split(shortened(line))
    begin = words.index("tk")
    environment = dict(word.split("=", 1) for word in words[:begin])
    server = Server(*words[begin + 2 :], cwd=folder, **environment)
    try:
        key = {"Authorization": "Bearer a-key"}
        card = httpx.get(f"{server.url}/v1/models", headers=key, verify=False, timeout=WAIT)
        [told] = card.raise_for_status().json()["data"]
        assert (told["id"], told["max_model_len"]) in {("gpt2", 512), ("./model", 1024)}
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    finally:
        server.stop()
