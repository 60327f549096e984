"""Start-up, and its error messages."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from safetensors.torch import load_file, save_file

from tests import checkpoints
from tests.api.conftest import CONTEXT, SMALL, SMALL_TOKENS
from tests.local import LocalServer
from tests.server import START_TIMEOUT, Process, Server, gone, until
from toolkit import LLM
from toolkit.api.http.connections.listener import bind
from toolkit.config import EngineConfig, LoRAConfig, ServerConfig
from toolkit.errors import ConfigError, ToolkitError
from toolkit.serving import lifecycle
from toolkit.serving.checks import default_name
from toolkit.serving.ready_card import network_url

KEY = "k e'y"


# ---- success


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server in processes of its own."""
    given = (str(model), "--served-model-name", "tiny", "--num-gpu-blocks-override", "4096")
    served = Server(*given, cwd=tmp_path_factory.mktemp("started"))
    yield served
    served.stop()


def test_the_ready_card_has_model_device_cache_and_url(server: Server) -> None:
    """4096 blocks of 16 tokens hold eight requests of the full length."""
    assert re.search(r"model +tiny \(.*parameters, float32\)", server.stderr)
    assert re.search(r"device +cpu", server.stderr)
    assert re.search(r"65,536 tokens: 8\.0 requests of the full 8,192", server.stderr)
    assert re.search(r"sampling +temperature 1 \(by default\)", server.stderr)
    assert re.search(rf"URL +{re.escape(server.url)}", server.stderr)
    assert f"open {server.url} in a browser" in server.stderr
    assert re.search(r"ready in \d+\.\d s", server.stderr)
    assert "Try:\ntk chat\ncurl " in server.stderr


def test_the_phases_of_start_up_are_timed(server: Server) -> None:
    before_the_card = server.stderr.split("ready in")[0]
    timed = re.findall(r"^ +(\S.*?) +\d+\.\d\d s$", before_the_card, re.MULTILINE)
    assert timed == ["config", "weights", "KV cache"]


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_log_in_json_is_all_that_stderr_gets(
    bare_model: Path, tmp_path: Path, is_refused: bool
) -> None:
    """Off a terminal it is the default."""
    arguments = ["serve", str(bare_model), "--port", "0", "--num-threads", "1"]
    arguments += ["--max-model-len", "999999"] * is_refused
    process = Process(*arguments, cwd=tmp_path, TK_LOG_FORMAT="auto")
    if is_refused:
        assert process.wait(START_TIMEOUT) == 2
    else:
        until(lambda: '"curl"' in process.stderr, START_TIMEOUT)
    process.stop()
    lines = [json.loads(line) for line in process.lines]
    if is_refused:
        assert lines[-1]["level"] == "critical"
        assert lines[-1]["message"].startswith("--max-model-len is 999999, but")
    else:
        assert [line["phase"] for line in lines if "phase" in line] == [
            "config",
            "weights",
            "KV cache",
        ]
        assert re.fullmatch(r"tk \S+ ready in \S+ s at http://127\S+", lines[-1]["message"])
        assert lines[-1]["URL"] in lines[-1]["curl"]
        assert lines[-1]["model"].endswith("parameters, float32)")


def test_the_web_server_is_imported_after_the_core_is_started() -> None:
    """The core takes longest to start."""
    code = (
        "import sys, toolkit.serving.lifecycle; "
        "sys.exit(bool({'fastapi', 'uvicorn', 'pydantic', 'torch'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_curl_line_works(server: Server) -> None:
    ran = subprocess.run(
        ["bash", "-c", server.curl], capture_output=True, text=True, timeout=60, check=True
    )
    answer = json.loads(ran.stdout)
    assert answer["object"] == "chat.completion"
    assert answer["usage"]["completion_tokens"] > 0


@pytest.fixture(scope="module")
def configured(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with settings from the file, variables and a flag, started as users do."""
    cwd = tmp_path_factory.mktemp("configured")
    (cwd / "tk.toml").write_text(
        'served-model-name = "from-the-file"\nmax-model-len = 64\nblock_size = 8\nport = 1\n'
    )
    variables = {"TK_PORT": "0", "TK_MAX_MODEL_LEN": "80", "TK_API_KEY": KEY}
    flags = ("--max-model-len", "96")
    server = Server(str(model), *flags, cwd=cwd, port=None, forked=False, **variables)
    yield server
    server.stop()


def test_flags_override_variables_and_variables_the_file(configured: Server) -> None:
    assert urlsplit(configured.url).port not in (1, ServerConfig().port), "any free port"
    with configured.openai(KEY) as client:
        [card] = client.models.list().data
    assert (card.id, card.max_model_len) == ("from-the-file", 96)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_curl_line_reads_the_key_from_its_variable(configured: Server) -> None:
    assert KEY not in configured.stderr
    environment = os.environ | {"TK_API_KEY": KEY}
    ran = subprocess.run(
        ["bash", "-c", configured.curl], env=environment, capture_output=True, check=True
    )
    assert json.loads(ran.stdout)["object"] == "chat.completion"


def test_the_ready_card_has_a_place_for_the_key_of_a_chat(model: Path, tmp_path: Path) -> None:
    server = LocalServer(str(model), "--api-key", KEY, cwd=tmp_path)
    server.stop()
    assert "Try:\nTK_API_KEY=KEY tk chat\ncurl " in server.stderr


def test_default_port_is_8000() -> None:
    assert ServerConfig().port == 8000


def test_default_model_name_is_that_of_the_folder(base: Server) -> None:
    with base.openai() as client:
        [card] = client.models.list().data
        assert card.id == "base"
        assert Path(card.root).is_dir()
        for name in ("base", card.root):
            assert client.models.retrieve(name).id == "base"
            assert client.completions.create(model=name, prompt="a", max_tokens=1).model == "base"
    assert 'model_name="base"' in base.http.get("/metrics").text


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (None, "tk-demo"),
        (".", "here"),
        ("./", "here"),
        ("..", "up"),
        ("../sibling/", "sibling"),
        ("{home}/up/sibling", "sibling"),
        ("~/up/here", "here"),
        ("{home}/hub/models--org--name-1/snapshots/0123abc", "org/name-1"),
        ("org/name", "org/name"),
        ("gpt2", "gpt2"),
    ],
)
def test_default_model_name_has_no_path(tmp_path, monkeypatch, model, name):
    for folder in ("up/here", "up/sibling", "hub/models--org--name-1/snapshots/0123abc"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "up/here")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_name(model and model.format(home=tmp_path)) == name


@pytest.mark.parametrize(
    ("host", "settings", "says"),
    [
        ("0.0.0.0", {}, "every client can"),
        ("0.0.0.0", {"api_key": ("k",)}, "every API key can"),
        ("0.0.0.0", {"admin_key": "k"}, ""),
        ("127.0.0.1", {}, ""),
    ],
)
def test_open_endpoints_of_adapters_are_warned_of(caplog, host, settings, says):
    engine = EngineConfig(lora=LoRAConfig(lora_dir=".", allow_runtime_lora=True))
    with socket.socket() as listener:
        listener.bind((host, 0))
        lifecycle.warn_of_open_adapters(engine, ServerConfig(**settings), listener)
    assert says in caplog.text
    assert bool(caplog.text) == bool(says)


@pytest.mark.parametrize(("host", "is_shown"), [("0.0.0.0", True), ("127.0.0.1", False)])
def test_the_address_for_other_machines_is_the_machines(host: str, is_shown: bool) -> None:
    own = {one.address for each in psutil.net_if_addrs().values() for one in each}
    with bind(host, 0) as listener:
        url = network_url(listener, ServerConfig())
        if url is None:  # also without a network
            assert not is_shown or own <= {"127.0.0.1", "::1"}
        else:
            assert is_shown
            assert urlsplit(url).hostname in own - {"0.0.0.0", "127.0.0.1"}
            assert urlsplit(url).port == listener.getsockname()[1]


def test_an_idle_server_uses_almost_no_cpu(server: Server) -> None:
    until(server.is_idle)

    def share() -> float:
        before, start = server.cpu_seconds(), time.monotonic()
        time.sleep(1.5)
        return (server.cpu_seconds() - before) / (time.monotonic() - start)

    assert any(share() < 0.05 for _ in range(3))  # earlier work may still run in the first
    assert server.popen.poll() is None


# ---- failure


@dataclass
class Failure:
    """A wrong start: its arguments, and words of the error message."""

    says: list[str]
    arguments: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    tokenizer: bool = False
    code: int = 2
    prepare: Callable[[Path], object] = lambda folder: None
    """Damages the folder `model` in the working directory, a copy of a model with two shards."""


def edit(**changes: object) -> Callable[[Path], None]:
    return lambda folder: checkpoints.edit_json(folder / "config.json", **changes)


def shards(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.safetensors"))
    assert len(found) > 1
    return found


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def spoil(folder: Path) -> None:
    for path in shards(folder):
        save_file({k: v * float("nan") for k, v in load_file(path).items()}, path)


FAILURES = {
    "truncated weights": Failure(["model-00001"], prepare=lambda f: cut(shards(f)[0], 2000)),
    "corrupt tokenizer": Failure(
        ["tokenizer"], tokenizer=True, prepare=lambda f: (f / "tokenizer.json").write_text("{")
    ),
    "weights that are not numbers": Failure(["its first step fails", "not finite"], prepare=spoil),
    "little memory": Failure(
        [f"--max-model-len {SMALL_TOKENS} ", "--kv-cache-memory", str(CONTEXT)],
        ["model", "--kv-cache-memory", str(SMALL)],
        code=1,
    ),
}  # fmt: skip
"""Errors of the engine."""
STARTED = "little memory"  # the one whose process is started as users do


EARLY_FAILURES = {
    "unknown model": Failure(["modle", "Did you mean model"], ["modle"]),
    "unknown file": Failure(["There is no file modl.gguf."], ["modl.gguf"]),
    "unknown folder": Failure(["./modl", "no folder", "Did you mean model"], ["./modl"]),
    "not a model folder": Failure(["config.json"], ["."]),
    "wrong variable": Failure(["TK_PORT", "abc"], ["model"], {"TK_PORT": "abc"}),
    "wrong host": Failure(["--host", "nowhere.invalid"], ["model", "--host", "nowhere.invalid"]),
    "wrong value": Failure(["--block-size", "999"], ["model", "--block-size", "999"]),
}  # fmt: skip
"""Errors of the first process."""


MODEL_FAILURES: dict[str, tuple[list[str], dict[str, object], Callable[[Path], object]]] = {
    "corrupt config": (
        ["config.json"], {}, lambda f: (f / "config.json").write_text('{"model_type": ')
    ),
    "unsupported architecture": (
        ["BertForMaskedLM"], {}, edit(architectures=["BertForMaskedLM"], model_type="bert")
    ),
    "missing shard": (["model-00002"], {}, lambda f: shards(f)[1].unlink()),
    "too long": (
        ["--max-model-len", "9000", str(CONTEXT)], {"max_model_len": 9000}, lambda f: None
    ),
}  # fmt: skip
"""Errors of the engine that its process reports as it does those of FAILURES: words of the message,
settings, and damage of the model."""


@pytest.mark.parametrize("name", MODEL_FAILURES)
def test_an_error_of_the_model_names_its_cause(tmp_path: Path, name: str) -> None:
    says, settings, damage = MODEL_FAILURES[name]
    folder = checkpoints.save(
        checkpoints.make_reference("llama3-gqa"), tmp_path / "model", max_shard_size="40KB"
    )
    checkpoints.edit_json(folder / "config.json", max_position_embeddings=CONTEXT)
    damage(folder)
    with pytest.raises(ToolkitError) as caught:
        LLM(str(folder), device="cpu", **settings)
    for part in says:
        assert part in caught.value.message


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Process]:
    """Returns the ended process of one of FAILURES. They run in parallel."""
    model = checkpoints.make_reference("llama3-gqa").module

    def run(name: str) -> Process:
        failure = FAILURES[name]
        cwd = tmp_path_factory.mktemp("wrong")
        folder = checkpoints.save(
            model, cwd / "model", tokenizer=failure.tokenizer, max_shard_size="40KB"
        )
        checkpoints.edit_json(folder / "config.json", max_position_embeddings=CONTEXT)
        failure.prepare(folder)
        arguments = failure.arguments or ["model"]
        process = Process("serve", *arguments, "--port", "0", cwd=cwd, forked=name != STARTED)
        try:
            process.wait(START_TIMEOUT)
        finally:
            process.stop()
        return process

    with ThreadPoolExecutor(3) as pool:
        done = dict(zip(FAILURES, pool.map(run, FAILURES), strict=True))
    return done.__getitem__


@pytest.mark.parametrize("name", FAILURES)
def test_a_start_up_error_is_one_message_and_an_exit_code(
    failed: Callable[[str], Process], name: str
) -> None:
    process = failed(name)
    check_failure(FAILURES[name], process.popen.returncode, process.lines)


@pytest.mark.parametrize("name", EARLY_FAILURES)
def test_an_error_before_the_engine_starts_is_one_message(
    tk_here: Callable[..., subprocess.CompletedProcess[str]],
    model: Path,
    tmp_path: Path,
    name: str,
) -> None:
    failure = EARLY_FAILURES[name]
    (tmp_path / "model").symlink_to(model)
    # The default port may be in use.
    variables = {"TK_PORT": "0", "TK_LOG_FORMAT": "text"} | failure.variables
    ended = tk_here("serve", *failure.arguments, cwd=tmp_path, **variables)
    check_failure(failure, ended.returncode, ended.stderr.splitlines())


def check_failure(failure: Failure, code: int, lines: list[str]) -> None:
    assert code == failure.code
    message = lines[-1]
    assert message.startswith("tk: ")
    for part in failure.says:
        assert part in message
    others = [
        line
        for line in lines
        if not re.match(r" +(config|weights|KV cache) +[\d.]+ s$|[\d:]{8} INFO ", line)
    ]
    assert others == [message], "only the phases before it, and no traceback"


def test_the_length_named_by_the_little_memory_message_fits(base: Server) -> None:
    """The server has that length and the same memory."""
    body = {"prompt": "x" * 100, "max_tokens": SMALL_TOKENS - 100, "ignore_eos": True}
    answer = base.http.post("/v1/completions", json=body)
    assert answer.json()["usage"]["total_tokens"] == SMALL_TOKENS


def test_a_port_in_use_names_its_process(server: Server, bare_model: Path, tmp_path: Path) -> None:
    port = server.url.rpartition(":")[2]
    process = Process("serve", str(bare_model), "--port", port, cwd=tmp_path)
    assert process.wait(START_TIMEOUT) == 2
    [message] = process.lines
    assert message.startswith("tk: ")
    for part in (f"127.0.0.1:{port}", f"process {server.pid}", "--port"):
        assert part in message
    process.stop()


def test_a_port_is_bound_before_the_model_is_loaded() -> None:
    """The second of two servers fails at once, not after it has loaded its model."""
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"127.0.0.1:{port}"),
            bind("127.0.0.1", port),
        ):
            pass


def test_ctrl_c_ends_an_idle_server_and_frees_the_port(configured: Server) -> None:
    """An idle connection does not delay it. The server closes it and has the TIME_WAIT state."""
    assert configured.http.get("/health").status_code == 200
    configured.signal(signal.SIGINT)
    assert configured.wait() == 0
    assert gone(configured.core)
    assert "Traceback" not in configured.stderr
    port = urlsplit(configured.url).port
    configured.http.close()
    lingering = (port, psutil.CONN_TIME_WAIT)
    until(lambda: lingering in [(c.laddr.port, c.status) for c in psutil.net_connections("tcp")])
    with bind("127.0.0.1", port) as listener:
        assert listener.getsockname()[1] == port


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_during_start_up_ends_the_server_at_once(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    class Starting:
        async def start(self, *_: object) -> None:
            os.kill(os.getpid(), number)
            await asyncio.sleep(60)

        async def close(self) -> None:
            pass

    monkeypatch.setattr(lifecycle, "_make_front_end", lambda *_: Starting())
    config = ServerConfig(host="127.0.0.1", port=0, log_format="text")
    ended = lifecycle.serve(EngineConfig(), config, 0.0)
    assert asyncio.run(ended) == code
