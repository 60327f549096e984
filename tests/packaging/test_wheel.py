"""The built wheel can be installed, and holds everything that runs and nothing else."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import toolkit
from tests import builds

ROOT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
INFO = f"tk_llm-{toolkit.__version__}.dist-info"
DATA = f"tk_llm-{toolkit.__version__}.data"
LIBRARY = "toolkit/kernels/cpu/_kernels.so"
HAS_COMPILER = shutil.which("g++") is not None
PREPROCESSOR = """#!/bin/sh
for word in "$@"; do
    [ "$last" = -o ] && out=$word
    last=$word
done
case " $* " in
*" -c "*) g++ "$@" -M -MF /dev/null && exec g++ -x c++ -c /dev/null -o "$out" ;;
*) exec g++ "$@" ;;
esac
"""
"""A compiler that reads all sources and headers, and writes empty object files."""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the files that git would commit: a build must not pick up files of older builds."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout, to list the project's files")
    copy = tmp_path_factory.mktemp("tree")
    for name in run(
        "git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=ROOT
    ).split("\0"):
        if name and (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def fast_compiler(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return variables of a build with an empty library: it is not run here."""
    compiler = tmp_path_factory.mktemp("compiler") / "g++"
    compiler.write_text(PREPROCESSOR)
    compiler.chmod(0o755)
    return {"CC": str(compiler), "CXX": str(compiler)}


@pytest.fixture
def without_compiler(tmp_path: Path) -> dict[str, str]:
    """Return variables of a build without a compiler."""
    (tmp_path / "no").touch()
    return {"CC": str(tmp_path / "no"), "CXX": str(tmp_path / "no")}


@pytest.fixture(scope="module")
def built(tree: Path, fast_compiler: dict[str, str]) -> tuple[Path, Path]:
    """Build (wheel, sdist), the wheel from the unpacked sdist to show missing files."""

    def build_both(out: Path) -> None:
        sdist_only = (sys.executable, "-m", "build", "--sdist", "--no-isolation")
        run(*sdist_only, "--outdir", out, tree, cwd=tree)
        (sdist,) = out.glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            archive.extractall(tree / "unpacked", filter="data")
        (unpacked,) = (tree / "unpacked").iterdir()
        wheel_only = (sys.executable, "-m", "build", "--wheel", "--no-isolation")
        run(*wheel_only, "--outdir", out, unpacked, cwd=tree, **fast_compiler)

    copied = (path.relative_to(tree) for path in tree.rglob("*") if path.is_file())
    sources = [ROOT / path for path in copied if path.parts[0] != "tests"]
    tools = [importlib.metadata.version(name) for name in ("build", "setuptools", "wheel")]
    out = builds.build(
        "wheel", sources, (tools, sys.version, HAS_COMPILER, PREPROCESSOR), build_both
    )
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def names(built: tuple[Path, Path]) -> set[str]:
    """Return the names of the wheel's files."""
    with zipfile.ZipFile(built[0]) as archive:
        return set(archive.namelist())


def install(wheel: Path, environment: Path) -> Path:
    """Install the wheel alone into a new environment; return its Python."""
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=environment.parent)
    python = environment / "bin" / "python"
    options = ("--quiet", "--no-deps", "--no-index")
    run(*PIP, "--python", python, "install", *options, wheel, cwd=environment.parent)
    return python


def python_files(folder: Path, root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in folder.rglob("*.py")}


def shared_files(tree: Path) -> set[str]:
    """Return the man pages and completions by their names in the wheel."""
    pages = (tree / "man").iterdir()
    return {f"{DATA}/data/share/man/man{page.suffix[1:]}/{page.name}" for page in pages} | {
        f"{DATA}/data/share/bash-completion/completions/tk.bash",
        f"{DATA}/data/share/zsh/site-functions/_tk",
        f"{DATA}/data/share/fish/vendor_completions.d/tk.fish",
    }


def test_wheel_has_exactly_the_modules_of_toolkit_and_kernels(tree: Path, names: set[str]):
    ours = python_files(tree / "toolkit", tree)
    kernels = {f"toolkit/{name}" for name in python_files(tree / "kernels", tree)}
    assert "toolkit/kernels/triton/attention/attention.py" in kernels
    assert "toolkit/scheduler/scheduler.py" in ours
    assert {name for name in names if name.endswith(".py")} == ours | kernels


def test_wheel_has_every_data_file_of_the_package(tree: Path, names: set[str]):
    data = {
        str(path.relative_to(tree))
        for path in (tree / "toolkit").rglob("*")
        if path.is_file() and path.suffix not in (".py", ".md")
    }
    data |= {
        f"toolkit/{path.relative_to(tree)}"
        for path in (tree / "kernels").rglob("*")
        if path.is_file() and path.suffix not in (".py", ".md", ".cpp", ".h")
    }
    if (tree / "toolkit" / "demo" / "model").is_dir():
        assert "toolkit/demo/model/config.json" in data
    assert data <= names


def test_wheel_has_no_other_data_files(tree: Path, names: set[str]):
    model = {f"toolkit/demo/model/{path.name}" for path in (tree / "toolkit/demo/model").iterdir()}
    report = {"toolkit/bench/report/report.css", "toolkit/bench/report/report.js"}
    page = {f"toolkit/api/web/page.{kind}" for kind in ("css", "html")}
    page |= {f"toolkit/api/web/{name}.js" for name in ("chat", "connection", "markdown", "store")}
    library = {LIBRARY} if HAS_COMPILER else set()
    assert "toolkit/demo/model/model.safetensors" in model
    data = {name for name in names if not name.endswith(".py") and not name.startswith(INFO)}
    assert data == model | report | page | library | shared_files(tree)


def test_wheel_has_no_tools_tests_or_training_data(tree: Path, names: set[str]):
    training = {path.name for path in (tree / "tools" / "demo").glob("*.txt")} | {"train.py"}
    assert (tree / "tools" / "demo" / "train.py").is_file()
    assert len(training) > 1
    assert not [name for name in names if name.startswith(("tools/", "tests/"))]
    assert not [name for name in names if name.rpartition("/")[2] in training]


def test_wheel_has_the_cpu_library_for_any_python(built: tuple[Path, Path], names: set[str]):
    if not HAS_COMPILER:
        pytest.skip("no C++ compiler")
    assert LIBRARY in names
    assert not [name for name in names if name.endswith((".cpp", ".h", ".o"))]
    assert built[0].name.startswith(f"tk_llm-{toolkit.__version__}-py3-none-")
    assert not built[0].name.endswith("-any.whl")


def test_build_without_a_compiler_leaves_out_the_library(
    tree: Path, tmp_path: Path, without_compiler: dict[str, str]
):
    build = (sys.executable, "setup.py", "-q", "build", "-b", tmp_path / "build")
    run(*build, "--build-lib", tmp_path / "lib", cwd=tree, **without_compiler)
    assert (tmp_path / "lib" / "toolkit" / "kernels" / "cpu" / "library.py").is_file()
    assert not list((tmp_path / "lib").rglob("*.so"))


def test_wheel_has_man_pages_and_completions_in_standard_places(tree: Path, names: set[str]):
    expected = shared_files(tree)
    assert f"{DATA}/data/share/man/man1/tk-serve.1" in expected
    assert {name for name in names if name.startswith(f"{DATA}/data/share")} == expected


def test_wheel_has_a_license_and_the_command(names: set[str], built: tuple[Path, Path]):
    assert f"{INFO}/licenses/LICENSE" in names
    with zipfile.ZipFile(built[0]) as archive:
        assert "tk = toolkit.cli:main" in archive.read(f"{INFO}/entry_points.txt").decode()
        metadata = archive.read(f"{INFO}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: <3.14,>=3.11" in metadata
    assert {name.split("/")[0] for name in names} == {"toolkit", INFO, DATA}
    assert not [name for name in names if "test" in name or "__pycache__" in name]


def test_installed_package_finds_its_modules(built: tuple[Path, Path], tmp_path: Path):
    """Installed without dependencies: only light modules are imported, the others are found."""
    python = install(built[0], tmp_path / "venv")
    code = """
import importlib.util, pathlib, sys, toolkit
import toolkit.errors
from toolkit.demo import MODEL_DIR
modules = ("kernels.reference", "kernels.triton.attention.attention", "scheduler.scheduler",
           "worker.worker", "cli.commands.serve")
for name in modules:
    place = pathlib.Path("toolkit", *name.split(".")).with_suffix(".py")
    assert (pathlib.Path(toolkit.__file__).parents[1] / place).is_file(), place
reference = importlib.util.find_spec("toolkit.kernels.reference").origin
print(toolkit.__version__, toolkit.__file__, reference, MODEL_DIR, sep="\\n")
"""
    version, *files = run(python, "-I", "-c", code, cwd=tmp_path).splitlines()
    assert version == toolkit.__version__
    assert all(Path(file).is_relative_to(tmp_path / "venv") for file in files)
    assert files[1].endswith("toolkit/kernels/reference.py")
    assert (tmp_path / "venv" / "bin" / "tk").is_file()


def test_editable_install_uses_the_checkout(
    tree: Path, tmp_path: Path, without_compiler: dict[str, str]
):
    build = f"from setuptools.build_meta import build_editable; build_editable({str(tmp_path)!r})"
    run(sys.executable, "-c", build, cwd=tree, **without_compiler)
    (wheel,) = tmp_path.glob("*.whl")
    python = install(wheel, tmp_path / "venv")
    code = (
        "import toolkit, toolkit.kernels; "
        "print(toolkit.__file__, toolkit.kernels.__file__, sep='\\n')"
    )
    files = run(python, "-I", "-c", code, cwd=tmp_path).splitlines()
    assert files == [str(tree / "toolkit" / "__init__.py"), str(tree / "kernels" / "__init__.py")]
