"""Requests and operations that wait for adapters, which a simulated executor reads."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest

from toolkit.engine.adapter_loads import AdapterLoads
from toolkit.engine.messages import Operate
from toolkit.lora.files import find_adapter
from toolkit.sampling.params import SamplingParams
from toolkit.scheduler import Request, RequestStatus
from toolkit.sequence import Adapter, SequenceSpec
from toolkit.worker.operations import LoadAdapter, Operation, UnloadAdapter


class Executor:
    """Reads an adapter when the test says so."""

    def __init__(self) -> None:
        self.reading: dict[str, Future[None]] = {}  # by name
        self.in_memory: set[str] = set()

    def operate(self, operation: Operation) -> Future[None]:
        done: Future[None] = Future()
        name = operation.adapter.name
        if isinstance(operation, UnloadAdapter):
            self.in_memory.discard(name)
            done.set_result(None)
        else:
            self.reading[name] = done
        return done

    def finish(self, name: str) -> None:
        self.in_memory.add(name)
        self.reading.pop(name).set_result(None)


@pytest.fixture
def executor() -> Executor:
    return Executor()


@pytest.fixture
def made(tmp_path) -> dict[str, Adapter]:
    for name in "abc":
        folder = tmp_path / name
        folder.mkdir()
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            (folder / file).write_text(name)
    return {name: find_adapter(name, Path(tmp_path / name)) for name in "abc"}


def request(adapter: Adapter) -> Request:
    params = SamplingParams(temperature=0.0)
    spec = SequenceSpec(
        prompt_token_ids=[1], params=params, max_tokens=9, eos_token_ids=[], adapter=adapter
    )
    return Request(adapter.name, spec)


def end(loads: AdapterLoads, request: Request) -> None:
    request.status = RequestStatus.FINISHED
    loads.leave(request)


def test_adapters_being_read_keep_their_place(executor, made):
    """A request that ends before its adapter is read frees no memory."""
    loads = AdapterLoads(executor.operate, 1, [])
    first, second = request(made["a"]), request(made["b"])
    loads.add(first)
    end(loads, first)
    loads.add(second)
    assert executor.reading.keys() == {"a"}
    executor.finish("a")
    assert loads.pop_ready() == []
    executor.finish("b")
    assert loads.pop_ready() == [second]
    assert executor.in_memory == {"b"}


def test_operations_that_wait_for_memory_are_work(executor, made):
    """An engine without work sleeps until it gets a message."""
    loads = AdapterLoads(executor.operate, 1, [])
    running = request(made["a"])
    loads.add(running)
    executor.finish("a")
    assert loads.pop_ready() == [running]
    loads.operate(Operate(LoadAdapter(made["b"]), 0, 7))
    end(loads, running)
    assert loads.has_work
    loads.pop_ready()
    executor.finish("b")
    loads.pop_ready()
    assert [result.ticket for _, result in loads.pop_results()] == [7]
    assert not loads.has_work
