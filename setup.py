"""Build the CPU kernels (`kernels/cpu`) into one library, once per instruction set.

Without a C++ compiler tk installs without them and runs PyTorch's own operations.
"""

from __future__ import annotations

import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

ROOT = Path(__file__).parent
FOLDER = Path("kernels", "cpu")
LIBRARY = "_kernels.so"
"""Loaded through ctypes: it is independent of the Python version."""
PLAIN = ["machine.cpp", "threads.cpp"]
"""Compiled once, for any machine."""
FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=fast",
    "-fno-math-errno",
]
WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
    "-Wno-unknown-warning-option",
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
]
"""The last two and psabi concern g++'s own headers and vectors; clang lacks some of them."""
LINK_FLAGS = ["-pthread"]
_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_AVX512 = [
    *_AVX2,
    "-mavx512f",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
    "-mavx512vnni",
    "-mprefer-vector-width=512",
]
if sys.platform == "darwin":
    # Python's own flags may name two processors at once; one file cannot have both's instructions.
    os.environ.setdefault("ARCHFLAGS", f"-arch {platform.machine()}")
    LINK_FLAGS = []  # threads need no library there, and clang warns of an unused flag
VARIANTS: dict[str, list[str]] = {"portable": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    VARIANTS |= {"avx2": _AVX2, "avx512_vnni": _AVX512, "avx512_bf16": [*_AVX512, "-mavx512bf16"]}


class BuildKernels(build_ext):
    """Compile every file with every variant's flags, and link one library."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1], LIBRARY))

    def build_extension(self, ext: Extension) -> None:
        target = self.get_ext_fullpath(ext.name)
        if not self.force and not newer_group([*ext.sources, *ext.depends], target, "newer"):
            return
        jobs = [(source, "plain", []) for source in ext.sources if Path(source).name in PLAIN]
        jobs += [
            (source, variant, flags)
            for source in ext.sources
            if Path(source).name not in PLAIN
            for variant, flags in VARIANTS.items()
        ]

        def compile_one(job: tuple[str, str, list[str]]) -> list[str]:
            source, variant, flags = job
            return self.compiler.compile(
                [source],
                output_dir=str(Path(self.build_temp, variant)),
                macros=[("TK_VARIANT", variant)],
                extra_postargs=[*FLAGS, *WARNINGS, *flags],
                depends=ext.depends,
            )

        with ThreadPoolExecutor() as threads:
            objects = [name for names in threads.map(compile_one, jobs) for name in names]
        self.compiler.link_shared_object(
            objects, target, extra_postargs=LINK_FLAGS, target_lang="c++"
        )


class Wheel(bdist_wheel):
    """A wheel for one platform and any Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":
    kernels = Extension(
        "toolkit.kernels.cpu._kernels",
        sources=sorted(str(path.relative_to(ROOT)) for path in (ROOT / FOLDER).glob("*.cpp")),
        depends=[
            __file__,
            *sorted(str(path.relative_to(ROOT)) for path in (ROOT / FOLDER).glob("*.h")),
        ],
        language="c++",
        optional=True,
    )
    setup(
        ext_modules=[] if sys.platform == "win32" else [kernels],
        cmdclass={"build_ext": BuildKernels, "bdist_wheel": Wheel},
    )
