"""The table of GPU kernels is complete, and only it imports them."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path
from types import FunctionType

import pytest
import torch

from toolkit.kernels.table import Kernels, gpu_kernels, kernels_for

TOOLKIT = Path(__file__).parents[2] / "toolkit"
TABLE = TOOLKIT.parent / "kernels" / "table.py"
IMPORTS_ALLOWED = {"doctor/probe.py"}
"""Modules that may import a Triton kernel: the probe compiles one in a new process."""


@pytest.fixture
def kernels() -> Kernels:
    pytest.importorskip("triton")
    return Kernels()


def test_every_member_is_callable_or_a_limit(kernels):
    members = dict(vars(kernels))
    linear = kernels.product_add_norm.__globals__["linear"]
    assert members.pop("row_classes")[-1] == linear.MAX_TOKENS
    assert members.pop("more_row_classes")[0] > vars(kernels)["row_classes"][-1]
    limits = {name for name in members if re.match(r"(min|max)_|rank_block", name)}
    assert {type(members[name]) for name in limits} == {int}
    assert all(callable(members[name]) for name in members.keys() - limits)


def test_every_member_is_typed(kernels):
    """mypy takes the members' types from the functions that they are."""
    for name, member in vars(kernels).items():
        if isinstance(member, FunctionType):
            function = inspect.unwrap(member)  # of a context manager
            kinds = [one.annotation for one in inspect.signature(function).parameters.values()]
            kinds.append(inspect.signature(function).return_annotation)
            assert inspect.Parameter.empty not in kinds, name
            assert not any("Any" in str(kind) for kind in kinds), name


def test_every_member_is_used(kernels):
    source = "".join(path.read_text() for path in TOOLKIT.rglob("*.py"))
    assert {name for name in vars(kernels) if not re.search(rf"kernels\.{name}\b", source)} == set()


def test_cpus_have_no_kernels():
    assert kernels_for(torch.device("cpu")) is None


def test_without_triton_there_are_no_kernels(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert gpu_kernels.__wrapped__() is None


def triton_imports(node: ast.AST) -> list[str]:
    """Return the modules of `kernels` for GPUs that a module imports to run."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return []
    names = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    found = [
        one for one in names if re.match(r"toolkit\.kernels\.(triton|cublas|products|sums)\b", one)
    ]
    return found + [one for child in ast.iter_child_nodes(node) for one in triton_imports(child)]


def test_only_the_table_imports_triton_kernels():
    found = {
        str(path.relative_to(TOOLKIT)): triton_imports(ast.parse(path.read_text()))
        for path in TOOLKIT.rglob("*.py")
    }
    assert {name for name, imports in found.items() if imports} == IMPORTS_ALLOWED
