"""What is built from this tree can be installed, and holds all of it that runs and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import toolkit

ROOT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


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
    """A copy of what git would commit: builds leave files behind, and must not pick up old ones."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout, to tell the project's files from others")
    copy = tmp_path_factory.mktemp("tree")
    for name in run(
        "git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=ROOT
    ).split("\0"):
        if name and (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def in_haste(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of a build whose compiler optimizes little: what it makes is packed here, and run elsewhere."""
    compiler = tmp_path_factory.mktemp("compiler") / "g++"
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("g++") or "no-compiler"} "$@" -O1\n')
    compiler.chmod(0o755)
    return {"CC": str(compiler), "CXX": str(compiler)}


@pytest.fixture
def without_compiler(tmp_path: Path) -> dict[str, str]:
    """The variables of a build that finds none."""
    (tmp_path / "no").touch()
    return {"CC": str(tmp_path / "no"), "CXX": str(tmp_path / "no")}


@pytest.fixture(scope="module")
def built(tree: Path, in_haste: dict[str, str]) -> tuple[Path, Path]:
    """(wheel, sdist); the wheel is built from the unpacked sdist, so that what the sdist lacks shows."""
    out = tree / "dist"
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", out, tree, cwd=tree)
    (sdist,) = out.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tree / "unpacked", filter="data")
    (unpacked,) = (tree / "unpacked").iterdir()
    build = (sys.executable, "-m", "build", "--wheel", "--no-isolation")
    run(*build, "--outdir", out, unpacked, cwd=tree, **in_haste)
    (wheel,) = out.glob("*.whl")
    return wheel, sdist


@pytest.fixture(scope="module")
def names(built: tuple[Path, Path]) -> set[str]:
    with zipfile.ZipFile(built[0]) as archive:
        return set(archive.namelist())


def python_files(folder: Path, root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in folder.rglob("*.py")}


def test_the_wheel_has_every_module(tree: Path, names: set[str]):
    ours = python_files(tree / "toolkit", tree)
    kernels = {f"toolkit/{name}" for name in python_files(tree / "kernels", tree)}
    assert "toolkit/kernels/triton/attention.py" in kernels
    assert "toolkit/scheduler/scheduler.py" in ours
    assert {name for name in names if name.endswith(".py")} == ours | kernels


def test_the_wheel_has_every_file_that_the_package_reads(tree: Path, names: set[str]):
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


def test_the_wheel_has_the_cpu_kernels_built_for_any_python(
    built: tuple[Path, Path], names: set[str]
):
    if shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler")
    assert "toolkit/kernels/cpu/_kernels.so" in names
    assert not [name for name in names if name.endswith((".cpp", ".h", ".o"))]
    assert built[0].name.startswith(f"tk_llm-{toolkit.__version__}-py3-none-")
    assert not built[0].name.endswith("-any.whl")


def test_without_a_compiler_the_build_goes_on_without_the_cpu_kernels(
    tree: Path, tmp_path: Path, without_compiler: dict[str, str]
):
    build = (sys.executable, "setup.py", "-q", "build", "-b", tmp_path / "build")
    run(*build, "--build-lib", tmp_path / "lib", cwd=tree, **without_compiler)
    assert (tmp_path / "lib" / "toolkit" / "kernels" / "cpu" / "library.py").is_file()
    assert not list((tmp_path / "lib").rglob("*.so"))


def test_the_wheel_has_man_pages_and_completions_where_systems_look(tree: Path, names: set[str]):
    share = f"tk_llm-{toolkit.__version__}.data/data/share"
    pages = {f"{share}/man/man{page.suffix[1:]}/{page.name}" for page in (tree / "man").iterdir()}
    assert f"{share}/man/man1/tk-serve.1" in pages
    assert {name for name in names if name.startswith(share)} == pages | {
        f"{share}/bash-completion/completions/tk.bash",
        f"{share}/zsh/site-functions/_tk",
        f"{share}/fish/vendor_completions.d/tk.fish",
    }


def test_the_wheel_has_a_licence_and_the_command_and_nothing_foreign(names: set[str], built):
    info = f"tk_llm-{toolkit.__version__}.dist-info"
    assert f"{info}/licenses/LICENSE" in names
    with zipfile.ZipFile(built[0]) as archive:
        assert "tk = toolkit.cli:main" in archive.read(f"{info}/entry_points.txt").decode()
        metadata = archive.read(f"{info}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: <3.14,>=3.11" in metadata
    assert {name.split("/")[0] for name in names} == {
        "toolkit",
        info,
        info.replace(".dist-info", ".data"),
    }
    assert not [name for name in names if "test" in name or "__pycache__" in name]


def test_the_installed_package_finds_its_parts(built: tuple[Path, Path], tmp_path: Path):
    """Without dependencies, so that only light modules can be imported; the others are found."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    run(
        *PIP,
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        built[0],
        cwd=tmp_path,
    )
    code = """
import importlib.util, pathlib, sys, toolkit
import toolkit.errors
from toolkit.demo import MODEL_DIR
for name in ("kernels.reference", "kernels.triton.attention", "scheduler.scheduler", "worker.worker", "cli.serve"):
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


def test_an_editable_install_reads_the_checkout(
    tree: Path, tmp_path: Path, without_compiler: dict[str, str]
):
    build = f"from setuptools.build_meta import build_editable; build_editable({str(tmp_path)!r})"
    run(sys.executable, "-c", build, cwd=tree, **without_compiler)
    (wheel,) = tmp_path.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    run(
        *PIP,
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=tmp_path,
    )
    code = "import toolkit, toolkit.kernels; print(toolkit.__file__, toolkit.kernels.__file__, sep='\\n')"
    files = run(python, "-I", "-c", code, cwd=tmp_path).splitlines()
    assert files == [str(tree / "toolkit" / "__init__.py"), str(tree / "kernels" / "__init__.py")]
