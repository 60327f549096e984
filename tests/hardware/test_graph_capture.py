"""While a CUDA graph is captured nothing else is destroyed."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

from toolkit.hardware.graph_capture import captured, empty_cache


class Graph:
    """Notes what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        self.calls.append(("begin", pool))

    def capture_end(self) -> None:
        self.calls.append("end")

    def reset(self) -> None:
        self.calls.append("reset")


class Engine:
    """One that nobody uses any more, and that only the garbage collector finds."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def often():
    """The collector looks at every tenth object."""
    before = gc.get_threshold()
    gc.set_threshold(10)
    yield
    gc.set_threshold(*before)


def test_garbage_of_another_engine_is_collected_before_or_after():
    def lives_on() -> bool:
        """Whether an engine does among many new objects."""
        engine = weakref.ref(Engine())
        objects = [[] for _ in range(1000)]  # type: ignore[var-annotated]
        return len(objects) == 1000 and engine() is not None

    assert not lives_on()
    graph: Any = Graph()
    with captured(graph, "pool"):
        assert lives_on()
        assert graph.calls == [("begin", "pool")]
    assert graph.calls == [("begin", "pool"), "end"]
    assert not lives_on()


def test_after_an_error_nothing_is_left_of_the_graph_and_the_collector_is_as_it_was():
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


def test_memory_that_is_given_back_meanwhile_waits_for_the_end(monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("given back"))
    graph: Any = Graph()
    graph.calls = calls
    with captured(graph):
        other = threading.Thread(target=empty_cache)
        other.start()
        other.join(0.2)
        calls.append("launched")
    other.join(30)
    assert calls == [("begin", None), "launched", "end", "given back"]
