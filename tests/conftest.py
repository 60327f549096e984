"""Fixtures of all tests. No test uses the network beyond this machine."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Without bytecode files, each of a hundred servers would compile all modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if "PYTEST_XDIST_WORKER" in os.environ:
    # Several processes share the cores; threads that wait for each other would starve.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import gc

# Until all modules are imported: it would visit their growing number of objects again and again.
gc.disable()

import contextlib
import functools
import logging
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from toolkit.config.sources import CHECK_MEMORY

if TYPE_CHECKING:
    from tests.forked import ForkServer
    from toolkit import LLM
    from toolkit.doctor.probe import Probe

# The same examples in every run, without deadlines: failures depend only on the code.
settings.register_profile(
    "suite",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("suite")
# Hypothesis would parse each module of this project, and the examples would depend on which of them
# are imported.
providers.is_local_module_file = lambda _: False

# Without a GPU, Triton kernels run in Triton's interpreter. Set this before importing Triton.
if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def triton_runs() -> bool:
    """Return False if Triton was imported for a missing GPU; its tests then need a new process."""
    import triton.language as tl
    from triton.runtime.jit import JITFunction

    if torch.cuda.is_available():
        return True
    is_interpreted = not isinstance(tl.sum, JITFunction)
    if is_interpreted:
        from tests import interpreter

        interpreter.install()
    return is_interpreted


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a name in `checkpoints.ARCHITECTURES` to a checkpoint folder."""
    from tests import checkpoints

    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            folders[name] = checkpoints.save(
                checkpoints.make_reference(name), tmp_path_factory.mktemp(name)
            )
        return folders[name]

    return folder


@pytest.fixture(scope="session")
def engine(checkpoint: Callable[[str], Path]) -> Iterator[Callable[..., LLM]]:
    """Return a function from a checkpoint's name or folder, and settings, to a shared engine."""
    from tests.engines import SharedEngines

    shared = SharedEngines()

    def get(model: str | Path, **settings: Any) -> LLM:
        return shared.get(checkpoint(model) if isinstance(model, str) else model, **settings)

    yield get
    shared.close()


@pytest.fixture(scope="session")
def fork_server() -> ForkServer | None:
    """None where a process that has imported PyTorch cannot be forked."""
    from tests.forked import shared

    return shared()


@pytest.fixture(scope="module")
def forked_processes(fork_server: ForkServer | None) -> Iterator[None]:
    """Fork the ranks and cores that this process starts, which saves two seconds for each."""
    if fork_server is None:
        yield
        return
    from tests.forked import ForkedProcess
    from toolkit.engine.cores import core_client
    from toolkit.executor import local_ranks

    def start(*arguments: Any, **options: Any) -> ForkedProcess:
        return ForkedProcess(fork_server, *arguments, **options)

    gc.freeze()  # each group of ranks collects garbage at its end: see `frozen_heap`
    with pytest.MonkeyPatch.context() as patch:
        for module in (core_client, local_ranks):
            ours = types.SimpleNamespace(**vars(subprocess) | {"Popen": start})
            patch.setattr(module, "subprocess", ours)
        yield


@pytest.fixture
def unused_tcp_port() -> int:
    """Return an unused port that the system will not assign to other sockets."""
    from tests.server import free_port

    return free_port()


@contextlib.contextmanager
def restored_logging() -> Iterator[None]:
    """Restore the loggers' settings on exit."""
    loggers = [logging.getLogger(name) for name in ("", "toolkit")]
    before = [(one.level, one.handlers[:], one.propagate) for one in loggers]
    try:
        yield
    finally:
        for one, (level, handlers, propagate) in zip(loggers, before, strict=True):
            one.setLevel(level)
            one.handlers, one.propagate = handlers, propagate


@pytest.fixture
def tk_here(capfd: pytest.CaptureFixture[str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs `tk` in this process, where all modules are imported already."""
    from toolkit.cli import main

    def run(
        *arguments: str, stdin: str = "", cwd: Path | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryFile("w+") as piped:
            piped.write(stdin)
            piped.seek(0)
            patch.setattr(sys, "stdin", piped)
            patch.setattr(sys, "argv", ["tk", *arguments])
            if cwd is not None:
                patch.chdir(cwd)
            for name, value in environment.items():
                patch.setenv(name, value)
            capfd.readouterr()
            with restored_logging(), pytest.raises(SystemExit) as exit:
                main()
        return subprocess.CompletedProcess(arguments, exit.value.code, *capfd.readouterr())

    return run


@pytest.fixture(scope="session")
def doctors_probe() -> Probe:
    """The process in which `tk doctor` imports PyTorch. Its facts are those of all tests."""
    from toolkit.doctor.probe import Probe

    return Probe()


@pytest.fixture
def one_probe(doctors_probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `tk doctor` and `tk collect-env` share a process, which takes two seconds."""
    monkeypatch.setattr("toolkit.doctor.probe.Probe", lambda: doctors_probe)


@pytest.fixture(autouse=True)
def isolated_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide the TK_* variables and the tk.toml of the user who runs the tests."""
    for name in list(os.environ):
        if name.startswith("TK_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # with no running server
    monkeypatch.setenv(CHECK_MEMORY, "1")


def pytest_sessionfinish() -> None:
    """Write what this process recorded of Transformers (`make references`)."""
    from tests import references

    if references.IS_RECORDING:
        references.records().write()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Collect garbage from now on, except for the objects of modules and collected tests."""
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


@pytest.fixture
def frozen_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exempt what exists from garbage collection: 0.2 s each time, for the objects of all modules.

    `tk bench` collects before each measurement. It would end the exemption after it."""
    gc.freeze()
    monkeypatch.setattr(gc, "unfreeze", lambda: None)


QUICK_FOLDERS = frozenset(
    """attention bench chat cli client config doctor engine executor hardware layers metrics pooling
    sampling scheduler text tools top weights worker""".split()  # noqa: SIM905
)
# As text: a list would take a line per name.
SLOW_FILES = frozenset(
    """test_async_llm test_beam_search test_bench_clients test_bench_compare
    test_bench_engine test_bench_run test_chat_markdown test_chat_piped
    test_chat_template test_chat_terminal test_cpu_kernels test_batch_state
    test_data_parallel test_decoder_pooling test_demo test_doctor test_draft_masks
    test_embedding_parity test_failing_steps test_fp8_cache test_fp8_layers
    test_gguf_experts test_harmony test_hostile_server test_hub test_int8
    test_loading test_loading_memory test_memory test_mxfp4
    test_quantized_checkpoints test_quantized_experts test_run_command
    test_safetensors test_sampler test_scheduler test_seeds test_several_cores
    test_startup_benchmark test_structured_outputs test_surroundings
    test_tcp_channel test_template_pool test_text test_tokenizer test_tool_formats
    test_tool_grammars test_top_arithmetic test_top_keys test_top_parse test_top_run
    test_top_screens""".split()  # noqa: SIM905
)
"""Files of these folders that take more than two seconds."""


@functools.cache
def _is_quick(path: Path) -> bool:
    """True for the files that `-m quick` runs."""
    parts = path.relative_to(Path(__file__).parent).parts
    in_quick_folder = len(parts) == 1 or parts[0] in QUICK_FOLDERS
    return in_quick_folder and path.stem not in SLOW_FILES


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m quick`, skip other files before they are imported."""
    is_other = collection_path.name.startswith("test_") and not _is_quick(collection_path)
    return True if config.option.markexpr == "quick" and is_other else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark quick tests before `-m` chooses. Leave out those that need a GPU where there is none;
    skip them if the command line names tests. Skip those of all decoders unless `-m` names them."""
    for item in items:
        if _is_quick(item.path):
            item.add_marker(pytest.mark.quick)
        if item.get_closest_marker("models") and config.option.markexpr != "models":
            item.add_marker(pytest.mark.skip(reason="takes minutes: make test-models runs it"))
    if torch.cuda.is_available():
        return
    need_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if _names_tests(config):
        for item in need_gpu:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
        return
    others = {*need_gpu, *_others_in_interpreter(items)}
    config.hook.pytest_deselected(items=[item for item in items if item in others])
    items[:] = [item for item in items if item not in others]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "on_cpu(*ids): without a GPU, run only these cases of the test"
    )


def _names_tests(config: pytest.Config) -> bool:
    """True if the command line names tests with `::`. They run all their cases."""
    return any("::" in argument for argument in config.args)


def _others_in_interpreter(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the cases that only GPUs run: those that the test's mark `on_cpu` does not name."""
    cases: dict[str, dict[str, pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("on_cpu"):
            cases.setdefault(item.nodeid.partition("[")[0], {})[item.callspec.id] = item
    others: set[pytest.Item] = set()
    for name, group in cases.items():
        wanted = set(next(iter(group.values())).get_closest_marker("on_cpu").args)
        if missing := wanted - group.keys():
            raise pytest.UsageError(f"{name}: on_cpu names cases that do not exist: {missing}")
        others.update(item for case, item in group.items() if case not in wanted)
    return others
