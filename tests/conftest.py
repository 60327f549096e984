"""Fixtures for the whole suite. Nothing here, or anywhere in the tests, reaches beyond this machine."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Without bytecode each of a hundred servers would compile all its modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault(
        "OMP_NUM_THREADS", "1"
    )  # several processes share the cores; threads that wait for each other would starve

import contextlib
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# The same examples in every run, however slowly they are made up: a failure is the change's, not the machine's or the day's.
settings.register_profile(
    "suite",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("suite")

# Without a GPU, Triton kernels run in Triton's interpreter, to be asked for before Triton is imported.
if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def triton_runs() -> bool:
    """False where Triton was imported for a GPU that is not there; a process of its own is needed then."""
    import triton.language as tl
    from triton.runtime.jit import JITFunction

    return torch.cuda.is_available() or not isinstance(tl.sum, JITFunction)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a small random checkpoint, by its name in `checkpoints.ARCHITECTURES`; each is made once."""
    from tests import checkpoints

    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = checkpoints.save(
                checkpoints.make_reference(name), tmp_path_factory.mktemp(name)
            )
        return made[name]

    return folder


@pytest.fixture
def unused_tcp_port() -> int:
    """A port that nobody listens on, and that the system gives to nobody who asks for any while a test relies on that."""
    from tests.server import free_port

    return free_port()


@contextlib.contextmanager
def unchanged_logging() -> Iterator[None]:
    """What is set of the loggers inside is set back."""
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
    """Runs `tk` in this process, where everything is imported already: its exit code and what it wrote."""
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
            with unchanged_logging(), pytest.raises(SystemExit) as ended:
                main()
        return subprocess.CompletedProcess(arguments, ended.value.code, *capfd.readouterr())

    return run


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tests see no TK_* variable and no tk.toml of whoever runs them."""
    for name in list(os.environ):
        if name.startswith("TK_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)
