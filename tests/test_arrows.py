"""The arrows between the rooms point one way, as ARCHITECTURE.md draws them."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1] / "toolkit"

ROOMS = {
    "errors": set(),
    "logs": set(),
    "pooling": set(),
    "parent": set(),
    "cgroup": set(),
    "capture": set(),
    "cores": set(),
    "config": set(),
    "metrics": set(),
    "demo": set(),
    "scheduler": {"sampling"},
    "sampling": {"kernels"},
    "attention": {"kernels"},
    "quantization": {"kernels"},
    "distributed": {"kernels", "capture"},
    "layers": {"attention", "quantization", "kernels", "distributed"},
    "models": {"layers", "attention", "quantization", "demo", "distributed", "kernels"},
    "worker": {
        "capture",
        "parent",
        "cores",
        "models",
        "layers",
        "attention",
        "quantization",
        "sampling",
        "scheduler",
        "kernels",
        "distributed",
    },
    "executor": {"parent", "cores", "worker", "models", "scheduler", "sampling", "distributed"},
    "engine": {"parent", "inventory", "executor", "scheduler", "worker", "models", "sampling"},
    "api": {"engine", "sampling", "worker"},
    "bench": {
        "engine",
        "executor",
        "worker",
        "models",
        "attention",
        "scheduler",
        "sampling",
        "demo",
        "kernels",
        "capture",
    },
    "chat": {"bench"},
    "top": {"bench"},
    "inventory": {"models", "demo"},
    "doctor": {"inventory", "cli", "kernels", "cores"},
    "cli": {"api", "engine", "bench", "chat", "top", "sampling", "models", "inventory", "doctor"},
    "docs": {"cli", "api", "worker"},
}
"""What each room may import of ours, besides what everybody may: config, errors, logs, metrics, pooling."""

EVERYBODY = {"config", "errors", "logs", "metrics", "pooling", "cgroup"}
LIGHT = {"cgroup", "cores", "config", "pooling", "cli", "errors", "scheduler", "demo", "inventory"}
HEAVY = {"torch", "transformers", "textual", "fastapi", "aiohttp", "uvicorn", "tokenizers"}


def imports(path: Path, *, top_level_only: bool = False) -> set[str]:
    """Dotted names that a file imports, leaving out what is only for type checkers."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found = set()
    for node in nodes:
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def room_files():
    return [
        (path.relative_to(ROOT).parts[0].removesuffix(".py"), path)
        for path in sorted(ROOT.rglob("*.py"))
        if path.relative_to(ROOT).parts[0] not in ("__init__.py", "__main__.py")
    ]


def test_every_room_is_known_and_imports_only_what_it_may():
    wrong = []
    for room, path in room_files():
        allowed = ROOMS[room] | EVERYBODY | {room}
        for name in imports(path):
            parts = name.split(".")
            # `sampling.params` may be imported from anywhere, and `toolkit` itself has the version.
            if (
                parts[0] != "toolkit"
                or parts[1] == "__version__"
                or name.startswith("toolkit.sampling.params")
            ):
                continue
            if parts[1] not in allowed:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


def test_the_scheduler_has_no_torch_and_light_rooms_import_nothing_heavy_at_the_top():
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for room, path in room_files()
        if room in LIGHT
        for name in imports(path, top_level_only=room != "scheduler")
        if name.split(".")[0] in HEAVY
    ]
    assert not wrong
