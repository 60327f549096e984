"""While a CUDA graph is captured, nothing else is destroyed."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

from toolkit.hardware.graph_capture import captured, empty_cache


class Graph:
    """Records its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        self.calls.append(("begin", pool))

    def capture_end(self) -> None:
        self.calls.append("end")

    def reset(self) -> None:
        self.calls.append("reset")


class Engine:
    """An unused engine that only the garbage collector frees."""

    def __init__(self) -> None:
        self.cycle = self


@pytest.fixture(autouse=True)
def frequent_collection():
    """Run the garbage collector after every tenth allocation."""
    before = gc.get_threshold()
    gc.set_threshold(10)
    yield
    gc.set_threshold(*before)


def test_garbage_is_collected_before_or_after_a_capture():
    def survives() -> bool:
        """Return whether an unused engine survives many allocations."""
        engine = weakref.ref(Engine())
        objects = [[] for _ in range(1000)]  # type: ignore[var-annotated]
        return len(objects) == 1000 and engine() is not None

    assert not survives()
    graph: Any = Graph()
    with captured(graph, "pool"):
        assert survives()
        assert graph.calls == [("begin", "pool")]
    assert graph.calls == [("begin", "pool"), "end"]
    assert not survives()


def test_failed_capture_resets_the_graph_and_restores_the_collector():
    graph: Any = Graph()
    with pytest.raises(RuntimeError, match="out of memory"), captured(graph):
        raise RuntimeError("out of memory")
    assert graph.calls == [("begin", None), "end", "reset"]
    assert gc.isenabled()
    gc.disable()
    try:
        with captured(Graph()):  # type: ignore[arg-type]
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_empty_cache_waits_for_the_end_of_a_capture(monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("emptied"))
    graph: Any = Graph()
    graph.calls = calls
    with captured(graph):
        other = threading.Thread(target=empty_cache)
        other.start()
        other.join(0.2)
        calls.append("launched")
    other.join(30)
    assert calls == [("begin", None), "launched", "end", "emptied"]
