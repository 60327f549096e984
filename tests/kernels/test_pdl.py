"""Kernels that are launched early read before their `wait` what `pdl.EARLY` says."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolkit.kernels import reference

pytest.importorskip("triton")
from toolkit.kernels.triton import pdl

FOLDER = Path(reference.__file__).parent / "triton"
TREES = {path.stem: ast.parse(path.read_text()) for path in FOLDER.rglob("*.py")}
FUNCTIONS = {
    (module, node.name): node
    for module, tree in TREES.items()
    for node in tree.body
    if isinstance(node, ast.FunctionDef)
}
Roots = frozenset[str]  # parameters that a value was computed from
NONE: Roots = frozenset()
WAITS = {
    False: ("wait(PDL)", "wait(PDL and (not RANK))"),
    True: ("wait(PDL)", "wait(PDL and RANK)"),
}
"""Calls that wait, by whether the kernel has adapters."""


def imported(module: str) -> dict[str, tuple[str, str]]:
    """Return the functions that a module's names stand for, by name."""
    found = {name: (own, name) for own, name in FUNCTIONS if own == module}
    for node in TREES[module].body:
        if isinstance(node, ast.ImportFrom) and node.level and node.module:
            other = node.module.rpartition(".")[2]
            found |= {alias.asname or alias.name: (other, alias.name) for alias in node.names}
    return found


NAMES = {module: imported(module) for module in TREES}


class Reads:
    """Parameters that a kernel loads, prefetches and writes before its `wait`, with LoRA adapters
    or without."""

    def __init__(self, module: str, kernel: str, *, is_adapted: bool = False) -> None:
        self.loaded, self.fetched, self.written = set(), set(), set()
        self.waits = False
        self._is_adapted = is_adapted
        function = FUNCTIONS[module, kernel]
        pointers = [arg.arg for arg in function.args.args if arg.arg.endswith("_ptr")]
        self._run(module, function.body, {name: frozenset([name]) for name in pointers})

    def _run(self, module: str, body: list[ast.stmt], names: dict[str, Roots]) -> Roots:
        """Execute statements up to `wait`. Return what they return."""
        returned = NONE
        for statement in body:
            if self.waits:
                break
            if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
                targets = getattr(statement, "targets", None) or [statement.target]
                self._assign(module, targets, statement, names)
            elif isinstance(statement, ast.Return):
                returned |= self._value(module, statement.value, names)
            elif self._is_adapted and ast.unparse(statement).startswith("if not RANK:"):
                continue
            elif isinstance(statement, ast.If | ast.For | ast.While):
                head = statement.iter if isinstance(statement, ast.For) else statement.test
                self._value(module, head, names)
                for block in (statement.body, statement.body, statement.orelse):
                    returned |= self._run(module, block, names)
                assert not self.waits, f"line {statement.lineno}: wait stands in a block"
            else:
                for child in ast.iter_child_nodes(statement):
                    self._value(module, child, names)
        return returned

    def _assign(
        self, module: str, targets: list[ast.expr], statement: ast.stmt, names: dict[str, Roots]
    ) -> None:
        """Add to what a name may hold: a branch may not be taken."""
        for target in targets:
            value = statement.value
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=True))
            elif isinstance(target, ast.Tuple):
                pairs = [(element, value) for element in target.elts]
            else:
                pairs = [(target, value)]
            for one, source in pairs:
                names[one.id] = names.get(one.id, NONE) | self._value(module, source, names)

    def _value(self, module: str, node: ast.AST | None, names: dict[str, Roots]) -> Roots:
        if node is None:
            return NONE
        if isinstance(node, ast.Name):
            return names.get(node.id, NONE)
        parts = [self._value(module, child, names) for child in ast.iter_child_nodes(node)]
        roots = NONE.union(*parts)
        if not isinstance(node, ast.Call):
            return roots
        called = ast.unparse(node.func)
        first = parts[1] if len(parts) > 1 else NONE
        if called == "wait":
            self.waits = ast.unparse(node) in WAITS[self._is_adapted]
        elif called in ("tl.load", "gl.load") or called.startswith("tl.atomic"):
            self.loaded |= first
            self.written |= first if "atomic" in called else NONE
            return NONE
        elif called in ("tl.store", "gl.store"):
            self.written |= first
        elif called == "fetch":
            self.fetched |= first
        elif called in NAMES[module] and called != "release":
            other, name = NAMES[module][called]
            function = FUNCTIONS[other, name]
            given = zip((arg.arg for arg in function.args.args), parts[1:], strict=False)
            return self._run(other, function.body, dict(given))
        return roots


def launches() -> Iterator[tuple[str, ast.Call, bool]]:
    """Yield (kernel, its launch, whether that is early)."""
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                called = ast.unparse(node.func.value).rpartition(".")[2]
                keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                owner, name = NAMES[module].get(called, (module, called))
                assert keywords.get("PDL") == keywords.get("launch_pdl"), called
                yield f"{owner}.{name}", node, "launch_pdl" in keywords


def test_every_kernel_launched_early_is_declared():
    found = {kernel for kernel, _, is_early in launches() if is_early}
    assert len(found) > 12
    assert found == pdl.EARLY.keys()


@pytest.mark.parametrize("kernel", pdl.EARLY)
def test_early_reads_are_those_that_are_declared(kernel):
    module, _, name = kernel.partition(".")
    declared, reads = pdl.EARLY[kernel], Reads(module, name)
    assert reads.waits, "the kernel waits"
    assert sorted(reads.loaded) == sorted(declared.constant + declared.step + declared.recent)
    assert sorted(reads.fetched - reads.loaded) == sorted(declared.fetched)
    assert not reads.written, "nothing is written before the kernels ahead have ended"
    adapted = Reads(module, name, is_adapted=True)
    assert adapted.waits
    assert sorted(adapted.loaded - reads.loaded) == sorted(declared.with_adapters)
    assert adapted.loaded >= reads.loaded
    assert not adapted.written


def test_shrink_releases_the_product_when_x_is_ready():
    body = [ast.unparse(one) for one in FUNCTIONS["lora", "_shrink_kernel"].body]
    assert body.count("release(PDL)") == 1
    assert body[body.index("wait(PDL)") + 1] == "release(PDL)"


@pytest.mark.parametrize("kernel", pdl.EARLY)
def test_every_program_waits_once(kernel):
    module, _, name = kernel.partition(".")
    body = FUNCTIONS[module, name].body
    for calls in WAITS.values():
        waits = [i for i, statement in enumerate(body) if ast.unparse(statement) in calls]
        assert len(waits) == 1
        before = [node for statement in body[: waits[0]] for node in ast.walk(statement)]
        assert not any(isinstance(node, ast.Return) for node in before)
