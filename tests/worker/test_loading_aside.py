"""Loading of weights in a thread, and how it ends."""

from __future__ import annotations

import contextlib
import gc
import shutil
import threading
import weakref
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import load_file

from toolkit.config import EngineConfig
from toolkit.errors import CheckpointError
from toolkit.models.build import build_model, load_config
from toolkit.weights.loading.loader import find_weights
from toolkit.weights.loading.safetensors import read_buffered, read_header, read_mapped
from toolkit.weights.slots import Slot
from toolkit.worker.startup import cache_sizing, runners
from toolkit.worker.startup.loading import Loading
from toolkit.worker.startup.phases import Phases
from toolkit.worker.worker import Worker

CPU = torch.device("cpu")


def thread_names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def test_loading_runs_in_a_thread_until_wait():
    go, done = threading.Event(), []

    def fill(stop):
        assert go.wait(60)
        done.append(threading.current_thread() is not threading.main_thread())

    loading = Loading(fill, CPU)
    assert not done
    go.set()
    loading.wait()
    assert done == [True]
    assert "loading" not in thread_names()


def test_wait_raises_the_error_of_the_thread():
    def fill(stop):
        raise CheckpointError("x ends early.")

    with pytest.raises(CheckpointError, match=r"x ends early\."):
        Loading(fill, CPU).wait()


def test_a_failed_load_keeps_no_memory(checkpoint, monkeypatch):
    """Not even until the garbage collector runs: a retry needs the memory."""
    config = EngineConfig.from_settings({"model": str(checkpoint("gpt2")), "device": "cpu"})
    worker, models = Worker(config, checkpoint("gpt2")), []

    def start(device, phases):
        model = torch.nn.Linear(1, 1)
        models.append(weakref.ref(model))

        def fill(stop):
            raise CheckpointError(f"{model} ends early.")

        worker._loading = Loading(fill, device)
        worker._loading.wait()

    monkeypatch.setattr(worker, "_start", start)
    gc.disable()
    try:
        with contextlib.suppress(CheckpointError):
            worker.start(lambda phase, seconds: None)
        assert [model() for model in models] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize("failure", [RuntimeError("no kernel"), KeyboardInterrupt()])
def test_a_failed_start_stops_loading(checkpoint, monkeypatch, failure):
    stopped = []
    config = EngineConfig.from_settings({"model": str(checkpoint("gpt2")), "device": "cpu"})
    worker = Worker(config, checkpoint("gpt2"))

    def start(device, phases):
        worker._loading = Loading(lambda stop: stopped.append(stop.wait(60)), device)
        raise failure

    monkeypatch.setattr(worker, "_start", start)
    with pytest.raises(type(failure)):
        worker.start(lambda phase, seconds: None)
    assert stopped == [True]
    assert "loading" not in thread_names()


def test_reading_pickled_tensors_can_be_stopped(checkpoint, tmp_path, monkeypatch):
    shutil.copy(checkpoint("gpt2") / "config.json", tmp_path)
    torch.save(load_file(checkpoint("gpt2") / "model.safetensors"), tmp_path / "pytorch_model.bin")
    model = build_model(load_config(tmp_path), device=CPU, dtype=torch.float32, max_model_len=8)
    stop, filled = threading.Event(), []
    monkeypatch.setattr(Slot, "fill", lambda slot, tensor: filled.append(slot) or stop.set())
    find_weights(model, tmp_path, "auto")(stop)
    assert 1 <= len(filled) <= 3  # the parts of one tensor


@pytest.mark.parametrize("read", [read_mapped, lambda *given: read_buffered(*given, pinned=False)])
def test_reading_safetensors_can_be_stopped(checkpoint, read):
    (file,) = checkpoint("gpt2").glob("*.safetensors")
    tensors, stop = read_header(file), threading.Event()
    targets = [torch.full(tensor.shape, torch.nan) for tensor in tensors]
    stop.set()
    read([(tensor, Slot(target)) for tensor, target in zip(tensors, targets, strict=True)], stop)
    assert all(target.isnan().all() for target in targets)
    stop.clear()
    read([(tensor, Slot(target)) for tensor, target in zip(tensors, targets, strict=True)], stop)
    assert not any(target.isnan().any() for target in targets)


def test_nested_phases_count_separately(monkeypatch):
    """The time of the weights, loaded while the cache is made, does not count for the cache."""
    moments = iter([100.0, 103.0, 107.0, 108.0, 200.0, 201.0])
    monkeypatch.setattr("toolkit.worker.startup.phases.time.perf_counter", lambda: next(moments))
    reported = {}
    phases = Phases(reported.__setitem__)
    with phases("KV cache"), phases("weights", 10.0):
        pass
    with phases("graphs"):
        pass
    assert reported == {"weights": 14.0, "KV cache": 4.0, "graphs": 1.0}


def test_the_weights_phase_on_a_cpu_ends_when_they_are_loaded(checkpoint, monkeypatch):
    events = []
    choose = runners.Backends
    monkeypatch.setattr(
        runners,
        "Backends",
        lambda *fit, **more: events.append("backend") or choose(*fit, **more),
    )
    config = EngineConfig.from_settings(
        {"model": str(checkpoint("gpt2")), "device": "cpu", "max_num_seqs": 2}
    )
    Worker(config, checkpoint("gpt2")).start(lambda phase, seconds: events.append(phase))
    assert events == ["backend", "config", "weights", "backend", "KV cache"]  # checked first


def test_graphs_are_chosen_after_loading(monkeypatch):
    """The thread that reads weights waits for the GPU too, and PyTorch watches all threads."""
    done: list[str] = []

    class Recorded:
        def __init__(self, *_: object) -> None:
            pass

        def __getattr__(self, name: str) -> object:
            return lambda *_, **more: done.append(name) or 0

    monkeypatch.setattr(cache_sizing, "WarmUp", Recorded)
    monkeypatch.setattr(cache_sizing, "drop_graphs_that_wait", lambda _: done.append("drop"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1, 1))
    runner = SimpleNamespace(backends=SimpleNamespace(is_capturable=True))
    setup, info = MagicMock(), SimpleNamespace(cache_bytes=0)
    setup.config.cache.gpu_memory_utilization = 0.9
    cache_sizing.measure_room(setup, runner, info, lambda: done.append("loaded"))
    steps = ["compile", "loaded", "drop", "choose_products", "peak_bytes", "graph_bytes"]
    assert done == steps
