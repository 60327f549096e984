"""Imports between packages have one direction, and modules have no import cycles."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import permutations
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"toolkit": "toolkit", "kernels": "toolkit.kernels", "tools": "tools"}
"""Folders of the checkout, and their package names."""

LEAVES = {
    "cache_group",
    "config",
    "console",
    "errors",
    "files",
    "framing",
    "imports",
    "logs",
    "metrics",
    "pem",
    "plugins",
    "running",
    "sequence",
    "units",
    "version",
}
"""Packages that all others may import, like the module `sampling.params`."""

ARROWS = {
    "version": set(),
    "cache_group": set(),
    "sequence": {"sampling"},
    "errors": set(),
    "files": set(),
    "framing": set(),
    "imports": set(),
    "units": set(),
    "logs": set(),
    "console": set(),
    "config": set(),
    "metrics": set(),
    "pem": set(),
    "plugins": set(),
    "running": set(),
    "demo": set(),
    "ctranslate2": set(),
    "gguf": {"ctranslate2"},
    "hub": {"demo", "gguf"},
    "kernels": set(),
    "hardware": set(),
    "client": set(),
    "text": {"gguf", "hardware"},
    "zygote": {"hardware"},
    "pictures": {"zygote"},
    "speech": {"gguf", "zygote"},
    "sampling": {"hardware", "kernels"},
    "scheduler": {"sampling"},
    "attention": {"kernels"},
    "distributed": {"hardware", "kernels"},
    "weights": {"ctranslate2", "distributed", "gguf", "kernels"},
    "layers": {"attention", "distributed", "kernels", "weights"},
    "models": {
        "attention",
        "ctranslate2",
        "distributed",
        "gguf",
        "kernels",
        "layers",
        "weights",
    },
    "lora": {"distributed", "gguf", "kernels", "layers", "weights"},
    "pooling": {"models", "scheduler", "weights"},
    "speculative": {
        "attention",
        "layers",
        "models",
        "weights",
    },
    "worker": {
        "attention",
        "distributed",
        "hardware",
        "kernels",
        "lora",
        "models",
        "pictures",
        "pooling",
        "sampling",
        "scheduler",
        "speculative",
        "speech",
        "weights",
    },
    "executor": {"distributed", "hardware", "models", "sampling", "scheduler", "worker"},
    "engine": {
        "executor",
        "gguf",
        "hardware",
        "hub",
        "lora",
        "pictures",
        "pooling",
        "sampling",
        "scheduler",
        "speech",
        "text",
        "worker",
    },
    "api": {"engine", "hardware", "sampling", "speech", "text"},
    "serving": {
        "api",
        "engine",
        "hub",
        "sampling",
        "scheduler",
        "speech",
        "text",
        "worker",
        "zygote",
    },
    "inventory": {
        "ctranslate2",
        "demo",
        "executor",
        "gguf",
        "hardware",
        "hub",
        "lora",
        "models",
        "pictures",
        "pooling",
        "scheduler",
        "weights",
        "worker",
    },
    "doctor": {"hardware", "inventory", "kernels", "models", "text"},
    "verify": {
        "engine",
        "hardware",
        "hub",
        "inventory",
        "kernels",
        "models",
        "pictures",
        "scheduler",
        "text",
        "weights",
        "worker",
    },
    "bench": {"client", "engine", "sampling"},
    "chat": {"client", "hub"},
    "top": {"client"},
    "transcribe": {"chat", "client", "hub", "speech"},
    "cli": {
        "bench",
        "chat",
        "client",
        "doctor",
        "engine",
        "hub",
        "inventory",
        "sampling",
        "serving",
        "top",
        "transcribe",
        "verify",
    },
    "__init__": {"engine", "sampling"},
    "__main__": {"cli"},
}
"""Packages that each package may import, in addition to the leaves."""

LIGHT = {
    "hardware",
    "config",
    "cli",
    "errors",
    "scheduler",
    "demo",
    "ctranslate2",
    "gguf",
    "inventory",
    "client",
    "logs",
    "pictures",
    "zygote",
}
"""Packages whose modules import nothing slow at the top."""
HEAVY = {"torch", "transformers", "textual", "fastapi", "aiohttp", "uvicorn", "tokenizers"}
TORCH = {"hardware/graph_capture.py", "hardware/memory.py"}
"""Modules of light packages that need PyTorch for its memory and graphs."""


def modules() -> dict[str, Path]:
    """Return all modules by dotted name."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def statements(block: ast.AST) -> Iterator[tuple[ast.AST, bool]]:
    """Yield (statement, is at the top level), also of nested blocks, without expressions."""
    nested = [block]
    while nested:
        parent = nested.pop()
        for name in ("body", "orelse", "handlers", "finalbody", "cases"):
            parts = getattr(parent, name, None)
            if isinstance(parts, list):  # lambdas and conditional expressions have others
                nested += parts
                yield from ((part, parent is block) for part in parts)


@functools.cache
def all_imports(name: str) -> dict[str, bool]:
    """Return the dotted names that a module imports, also for type checkers only.

    True for those imported at the top level."""
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    found: dict[str, bool] = {}
    for node, is_top_level in statements(ast.parse(MODULES[name].read_text())):
        names = set()
        if isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                above = ".".join(parts[: len(parts) - node.level + 1])
                base = f"{above}.{base}" if base else above
            names = {f"{base}.{alias.name}" for alias in node.names}
        for one in names:
            found[one] = is_top_level or found.get(one, False)
    return found


def imports(name: str, *, top_level_only: bool = False) -> set[str]:
    return {one for one, is_top in all_imports(name).items() if is_top or not top_level_only}


def imported_modules(name: str) -> set[str]:
    """Return the modules of this project that a module imports."""
    found = set()
    for imported in imports(name):
        while imported and imported not in MODULES:
            imported = imported.rpartition(".")[0]
        found.add(imported)
    return found - {name, ""}


def package_of(name: str) -> str:
    """Return the package of a module: `top` for `toolkit.top.app`."""
    return name.split(".")[1] if "." in name else "__init__"


def own_modules() -> list[str]:
    """Return the installed modules."""
    return [name for name in MODULES if name.split(".")[0] == "toolkit"]


def test_packages_import_only_allowed_packages():
    wrong = []
    for name in own_modules():
        allowed = ARROWS[package_of(name)] | LEAVES | {package_of(name)}
        wrong += [
            f"{name} imports {one}"
            for one in imported_modules(name)
            if one != "toolkit.sampling.params"
            and (one.startswith("tools") or package_of(one) not in allowed)
        ]
    assert not wrong


def test_packages_do_not_import_each_other():
    assert not [
        (one, other)
        for one, other in permutations(ARROWS, 2)
        if other in ARROWS[one] and one in ARROWS[other]
    ]
    TopologicalSorter(ARROWS).prepare()


def test_every_allowed_import_is_used():
    used = {package: set() for package in ARROWS}
    for name in own_modules():
        used[package_of(name)] |= {package_of(one) for one in imported_modules(name)}
    assert not {
        package: ARROWS[package] - found
        for package, found in used.items()
        if ARROWS[package] - found
    }


def test_modules_have_no_import_cycle():
    graph = {name: imported_modules(name) for name in MODULES}
    # `toolkit` itself imports the engine on first use; no module below imports `toolkit`.
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


def test_light_packages_import_nothing_slow_at_the_top():
    wrong = [
        f"{name} imports {one}"
        for name in own_modules()
        if package_of(name) in LIGHT
        and str(MODULES[name].relative_to(ROOT / "toolkit")) not in TORCH
        for one in imports(name, top_level_only=package_of(name) != "scheduler")
        if one.split(".")[0] in HEAVY
    ]
    assert not wrong
