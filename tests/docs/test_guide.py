"""README.md and docs/*.md: commands and snippets run, flags, routes, modules and links exist."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.docs.examples import (
    QUESTION,
    directed,
    hearing_server,
    is_invalid_measurement,
    save_model,
    write_certificate,
    write_files,
    write_sound,
)
from tests.docs.test_completions import COMMANDS
from tests.hub import Hub, hub_variables
from tests.local import CoreThread, LocalServer
from tests.pooling.folders import MINILM
from tests.records import server_of
from tests.server import Server
from toolkit import LLM
from toolkit.chat.commands import ALIASES as CHAT_ALIASES
from toolkit.chat.commands import COMMANDS as CHAT_COMMANDS
from toolkit.cli.help import settings_of
from toolkit.cli.root import tree
from toolkit.cli.vllm import rules_of
from toolkit.config.sources import CHECK_MEMORY, FILE_VARIABLE
from toolkit.demo import MODEL_DIR
from toolkit.engine.cores import core_client
from toolkit.logs import DEBUG
from toolkit.models.config.registry import model_types
from toolkit.models.rotary import SCALINGS
from tools.docs.prose import PROSE

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README_WORDS = 900  # at most
COLUMNS = 100
CHAT_MODEL = "Qwen/Qwen3-0.6B"
"""Model that pages recommend. Here, a folder of this name has the demo model."""

NOT_RUN = {
    r"make (serve|test)$": "sets up .venv",
    r"pip install ": "needs a package index",
    r"ray (start|get-auth-token) ": "needs several machines",
    r"ffmpeg ": "needs ffmpeg",
    r"tk serve openai/whisper": "needs a model that hears",
    r"curl -X DELETE .*/tk/requests/ID$": "needs a request in progress",
    r"tk \w+ \S*(\.gguf|-GGUF:)": "needs a GGUF model",
    r"tk serve .*\"eagle3\"": "needs a drafter that was trained for the model",
}
"""Commands that no test runs, and why. All other commands run here."""
MANUAL = {
    line
    for prose in PROSE.values()
    for _, lines in prose.examples
    for line in lines.split("\n")
    if not line.startswith("tk serve")
}
"""Examples of the manual, which `test_examples` runs."""
HUB = re.compile(r"tk (pull|show|rm) [A-Z]")
SPEECH = re.compile(r"tk transcribe |curl .*/v1/audio/")
"""Commands for a server whose model hears."""
SHELL = re.compile(r"[|<>~]|&&|\$|^tk man")
"""Commands for a shell; `tk man` replaces its process. The others run in this process."""
LANGUAGES = {"sh", "console", "ini", "python", "json", "toml", "text"}
TEMPLATE = "{% if tools %}<|system|><tool_call>{{ tools | tojson }}<|end|>{% endif %}"
"""Prefix for the demo model's chat template, which does not support tools."""
CONVERSATION = {
    "version": 1,
    "model": CHAT_MODEL,
    "system": None,
    "messages": [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hello."},
    ],
}
"""A saved conversation, for `tk chat --continue`."""


@dataclass(frozen=True)
class Block:
    """A fenced block. `file`: the file name after its language, for use in other examples."""

    page: str
    line: int
    language: str
    file: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_of_repository(self) -> bool:
        """True if it shows a file of the repository."""
        return bool(self.file) and (ROOT / self.file).is_file()

    @cached_property
    def commands(self) -> list[str]:
        """Command lines, without comments and prompts. Continued lines are joined."""
        lines = self.text.splitlines()
        if self.language == "console":
            lines = [re.sub(r"^\w?\$ ", "", line) for line in lines if is_input(line)]
        if self.language == "ini":
            lines = [line.partition("=")[2] for line in lines if line.startswith("ExecStart=")]
            lines = [re.sub(r"^\S*/", "", line) for line in lines]
        found, command = [], ""
        for line in lines:
            command += line.removesuffix("\\")
            if line.endswith("\\"):
                continue
            with suppress(ValueError):  # a quotation continues
                if words(command):
                    found.append(re.sub(r"\s+#(?=\s|$).*", "", command).strip())
                command = ""
                continue
            command += "\n"
        assert not command, f"{self.place}: unfinished: {command}"
        return found


def is_input(line: str) -> bool:
    """Return whether a line is a prompt with a command, or continues one."""
    return re.match(r"\w?\$ |    -", line) is not None


def words(line: str) -> list[str]:
    return shlex.split(line, comments=True)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks_of(path: Path) -> Iterator[Block]:
    text = path.read_text()
    for found in re.finditer(r"^```(\w*)(?: (\S+))?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, found.start()) + 2
        yield Block(name_of(path), line, found[1], found[2] or "", found[3])


def prose_of(path: Path) -> str:
    """Return a page without its blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def spans_of(path: Path) -> list[str]:
    """Return code within a page's sentences and tables."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose_of(path))]


BLOCKS = [block for path in PAGES for block in blocks_of(path)]
COMMAND_LINES = list(
    dict.fromkeys(
        command
        for block in BLOCKS
        if block.language in ("sh", "console", "ini")
        for command in block.commands
    )
)


def kind_of(line: str) -> str:
    """Name the test of a command line."""
    if any(re.match(pattern, line) for pattern in NOT_RUN):
        return "not run"
    if line in MANUAL:
        return "manual"
    if SPEECH.match(line):
        return "speech"
    if HUB.match(line):
        return "hub"
    if line.startswith("curl "):
        return "curl"
    if re.match(r"(TK_\w+=\S+ )*tk serve", line) and "--help" not in line:
        return "serve"
    if SHELL.search(line):
        return "shell"
    return "tk" if line.startswith("tk ") else "unknown"


def lines_of(kind: str) -> list[str]:
    return [line for line in COMMAND_LINES if kind_of(line) == kind]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models and files that pages name."""
    folder = tmp_path_factory.mktemp("guide")
    save_model(folder / "model")
    for name, target in {
        "gpt2": folder / "model",
        CHAT_MODEL: folder / "model",
        "Qwen/Qwen3-8B": folder / "model",
        "sentence-transformers/all-MiniLM-L6-v2": MINILM,
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(target)
    write_files(folder)
    write_sound(folder)
    write_server_files(folder)
    for name in ("sql", "sql-2", "support"):
        save_adapter(folder / "adapters" / name, folder / "model")
    for block in BLOCKS:
        if block.file and not block.is_of_repository:
            (folder / block.file).write_text(block.text)
    config = json.loads((folder / "model" / "tokenizer_config.json").read_text())
    (folder / "tools.jinja").write_text(TEMPLATE + config["chat_template"])
    chats = folder / ".local" / "share" / "tk" / "chats"
    chats.mkdir(parents=True)
    (chats / "saved.json").write_text(json.dumps(CONVERSATION))
    return folder


def write_server_files(folder: Path) -> None:
    """Write the keys, certificate and plug-ins that `tk serve` gets in pages."""
    (folder / "keys.txt").write_text("a-key\n")
    write_certificate(folder)
    plugins = Path(__file__).parents[1] / "plugins" / "example" / "tk_example"
    parsers = (plugins / "tools.py").read_text() + '\nTOOL_PARSERS = {"at": AtFormat}\n'
    (folder / "formats.py").write_text(parsers)
    middleware = (plugins / "middleware.py").read_text() + "\nlog_users = Timing\n"
    (folder / "my_middleware.py").write_text(middleware)


def save_adapter(folder: Path, model: Path) -> None:
    """Write a LoRA adapter of the model in PEFT's format."""
    module = "transformer.h.0.mlp.c_proj"
    columns, rows = load_file(model / "model.safetensors")[f"{module}.weight"].shape
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": [module]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    name = f"base_model.model.{module}"
    tensors = {
        f"{name}.lora_A.weight": torch.randn(2, columns) / 100,
        f"{name}.lora_B.weight": torch.randn(rows, 2) / 100,
    }
    save_file(tensors, folder / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    """A server for chats, embeddings and tools."""
    options = ("--pooling", "last", "--chat-template", "tools.jinja")
    adapter = ("--lora-modules", f"sql={folder / 'adapters' / 'sql'}", "--allow-runtime-lora")
    adapter += ("--lora-dir", str(folder / "adapters"))
    running = LocalServer(CHAT_MODEL, *options, *adapter, cwd=folder)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def hearing() -> Iterator[SimpleNamespace]:
    """A server whose model hears."""
    with hearing_server() as server:
        yield server


@pytest.fixture
def environment(folder: Path) -> dict[str, str]:
    """Environment of examples that use the server, without its address."""
    return {
        "HOME": str(folder),
        "TK_RANDOM_OUTPUT_LEN": "8",
    }


def test_commands_are_run_or_listed():
    assert lines_of("unknown") == []
    assert [p for p in NOT_RUN if not any(re.match(p, line) for line in COMMAND_LINES)] == []
    assert {block.language for block in BLOCKS} <= LANGUAGES


@pytest.mark.usefixtures("frozen_heap")
@pytest.mark.parametrize("line", lines_of("tk"))
def test_commands_run(
    line: str, server: Server, folder: Path, environment: dict[str, str], tk_here: Callable
):
    _, *arguments = words(directed(line, server))
    environment |= {"TK_URL": server.url}
    with server_of(line, folder):
        done = tk_here(*arguments, stdin=QUESTION, cwd=folder, **environment)
    assert done.returncode == 0 or ("bench" in line and is_invalid_measurement(done)), done.stderr
    assert done.stdout


@pytest.mark.parametrize("line", lines_of("serve"))
def test_servers_would_start(
    line: str,
    folder: Path,
    environment: dict[str, str],
    tk_here: Callable,
    monkeypatch: pytest.MonkeyPatch,
):
    """The flags are right and the model fits; `--dry-run` loads no weights."""
    monkeypatch.syspath_prepend(folder)
    line = line.replace("--max-model-len 8192", "--max-model-len 512").replace("/etc/tk/", "")
    start = words(line).index("tk")
    environment |= dict(word.split("=", 1) for word in words(line)[:start]) | {"TK_DEVICE": "cpu"}
    arguments = [word for word in words(line)[start + 1 :] if word != "--dry-run"]
    done = tk_here(*arguments, "--dry-run", cwd=folder, **environment)
    assert (done.returncode, done.stderr) == (0, "It fits.\n")


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("line", lines_of("curl"))
def test_curl_lines_get_an_answer(line: str, server: Server, folder: Path):
    line = directed(line, server).replace("curl ", "curl --silent --fail-with-body ", 1)
    done = subprocess.run(
        ["bash", "-c", line], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("line", lines_of("speech"))
def test_speech_is_transcribed(
    line: str, hearing: SimpleNamespace, tmp_path: Path, tk_here: Callable
):
    if line.startswith("curl ") and shutil.which("curl") is None:
        pytest.skip("needs curl")
    write_sound(tmp_path)
    line = directed(line, hearing).replace("curl ", "curl --silent --fail-with-body ", 1)
    if line.startswith("tk "):
        done = tk_here(*words(line)[1:], cwd=tmp_path, TK_URL=hearing.url)
    else:
        done = subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


@pytest.mark.parametrize("line", lines_of("shell"))
def test_pipelines_run(
    line: str, server: Server, folder: Path, environment: dict[str, str], programs: Path
):
    environment |= {"PATH": f"{programs}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", directed(line, server)], cwd=folder, stdin=subprocess.DEVNULL,
        env=os.environ | environment | {"TK_URL": server.url},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_models_are_fetched_shown_and_removed(
    tmp_path: Path, environment: dict[str, str], tk_here: Callable
):
    hub = Hub()
    hub.add(CHAT_MODEL, Path(MODEL_DIR))
    environment |= {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")}
    with hub_variables(environment):
        for line in lines_of("hub"):
            done = tk_here(*words(line)[1:], cwd=tmp_path, **environment)
            assert done.returncode == 0, done.stderr
            assert list((tmp_path / "hf").rglob("*.safetensors")) or not line.startswith("tk pull")
    hub.close()
    assert lines_of("hub")[-1].startswith("tk rm")
    assert not list((tmp_path / "hf").rglob("*.safetensors"))


SNIPPETS = [b for b in BLOCKS if b.language == "python" and not b.is_of_repository]


@pytest.mark.parametrize("page", dict.fromkeys(block.page for block in SNIPPETS))
def test_python_runs(
    page: str,
    server: Server,
    hearing: SimpleNamespace,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """Snippets of a page run in order and share variables. Engine cores are threads here."""
    stand_in = SimpleNamespace(Popen=CoreThread, PIPE=subprocess.PIPE)
    monkeypatch.setattr(core_client, "subprocess", stand_in)
    monkeypatch.chdir(folder)
    asked = hearing if page == "docs/speech.md" else server
    names: dict[str, object] = {"__name__": "__main__"}
    try:
        for block in SNIPPETS:
            if block.page == page:
                exec(compile(directed(block.text, asked), block.place, "exec"), names)
    finally:
        for value in names.values():
            if isinstance(value, LLM):
                value.shutdown()
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.language == "toml"], ids=lambda block: block.place
)
def test_settings_files_are_accepted(block: Block, tmp_path: Path, tk_here: Callable):
    (tmp_path / "tk.toml").write_text(block.text)
    done = tk_here("config", "show", cwd=tmp_path, HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_data_is_well_formed():
    for block in BLOCKS:
        if block.language == "json":
            json.loads(block.text)
        if block.language == "ini":
            configparser.ConfigParser().read_string(block.text)


BY_COMMAND = {
    path: flags | {*rules_of(" ".join(path[1:]))} for path, flags in COMMANDS
}  # vLLM's flags, too
FLAGS = set().union(*BY_COMMAND.values())
OTHER_PROGRAMS = re.compile(r"(pip|ray) ")


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_flags_and_commands_exist(path: Path):
    for span in spans_of(path):
        if not OTHER_PROGRAMS.match(span):
            known = flags_of(span) if span.startswith("tk ") else FLAGS
            assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", span)) <= known, span


def flags_of(span: str) -> set[str]:
    """Return the flags of the command that a span begins with. Fails if it does not exist."""
    path: tuple[str, ...] = ("tk",)
    for word in span.split()[1:]:
        if (*path, word) not in BY_COMMAND:
            break
        path = (*path, word)
    if len(path) > 1:
        return BY_COMMAND[path]
    assert span.startswith(("tk COMMAND", "tk -")), f"no such command: {span}"
    return FLAGS


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_variables_exist(path: Path):
    settings = {
        row.variable for names, _ in COMMANDS for row in settings_of(command_of(names[1:])).values()
    }
    mentioned = set(re.findall(r"\bTK_[A-Z_]+", path.read_text()))
    assert mentioned <= settings | {FILE_VARIABLE, CHECK_MEMORY, DEBUG}


def command_of(names: tuple[str, ...]) -> Any:
    command = tree()
    for name in names:
        command = command.commands[name]
    return command


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_routes_exist(path: Path, server: Server):
    """Code that begins with a slash is a route or a chat command."""
    routes = set(httpx.get(f"{server.url}/openapi.json").json()["paths"])
    known = {*routes, "/docs", "/redoc", "/openapi.json", *CHAT_COMMANDS, *CHAT_ALIASES}
    for span in spans_of(path):
        found = re.fullmatch(r"(?:GET |POST |DELETE )?(/[\w/{}.]+)(?: .*)?", span)
        assert found is None or found[1] in known, span


@pytest.mark.parametrize(
    "path", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=name_of
)
def test_modules_and_targets_exist(path: Path):
    text = path.read_text()
    for module in re.findall(r"python -m ((?:tools|tests|toolkit)[\w.]*\w)", text):
        assert find_spec(module), module
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"(?:^|`|\d )make ([a-z-]+)", text, re.MULTILINE):
        assert target in targets, target


@pytest.mark.parametrize(
    "path",
    sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]),
    ids=name_of,
)
def test_links_exist(path: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(path)):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        linked = path.parent / name if name else path
        assert linked.exists(), target
        assert not anchor or anchor in anchors_of(linked), target


def anchors_of(path: Path) -> set[str]:
    """Return GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose_of(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_index_lists_every_page():
    listed = re.findall(r"\]\((\w[\w.-]*\.md)\)", (ROOT / "docs" / "README.md").read_text())
    assert sorted(listed) == [
        p.name for p in PAGES if p.parent.name == "docs" and p.stem != "README"
    ]


def test_shown_files_are_those_of_the_repository():
    shown = [block for block in BLOCKS if block.is_of_repository]
    assert shown
    for block in shown:
        assert block.text == (ROOT / block.file).read_text(), block.place


def test_table_of_models_lists_every_architecture_and_rope_type():
    page = (ROOT / "docs" / "models.md").read_text()
    listed = re.findall(r"^\| .* \| `([\w-]+)` \|", page, re.MULTILINE)
    assert sorted(kind.replace("-", "_") for kind in listed) == list(model_types())
    rope_types = page.partition("The values of `rope_type` are")[2].partition(".")[0]
    assert set(re.findall(r"`(\w+)`", rope_types)) == SCALINGS.keys()


def test_results_of_the_readme_are_those_of_the_benchmarks():
    """Each pair `vLLM → tk` and each number of milliseconds."""
    readme, benchmarks = ((ROOT / f"{name}.md").read_text() for name in ("README", "BENCHMARKS"))
    results = readme.partition("## Results")[2].partition("\n## ")[0]
    pairs = re.findall(r"[\d,]+ → [\d,]+", results)
    times = re.findall(r"([\d.]+) ms", results)
    assert len(pairs) == 19
    assert len(times) == 2
    assert [one for one in pairs if one not in benchmarks] == []
    assert [one for one in times if f"{one} ms" not in " ".join(benchmarks.split())] == []


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= README_WORDS


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_lines_are_short(path: Path):
    for number, line in enumerate(path.read_text().splitlines(), 1):
        assert len(line) <= COLUMNS, f"line {number}"
