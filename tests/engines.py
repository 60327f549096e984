"""Engines that tests share, and the private parts of an engine that tests look at.

Only this file names private attributes of `LLM`, its core and its worker."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from toolkit import LLM
from toolkit.models.build import load_config
from toolkit.models.config.registry import describe
from toolkit.models.memory import MemoryLayout

MOST_ENGINES = 6
"""Shared engines that one test process keeps."""


class SharedEngines:
    """Engines by folder and settings. The least recently used ones are shut down."""

    def __init__(self) -> None:
        self._engines: OrderedDict[tuple[str, str], LLM] = OrderedDict()

    def get(self, folder: Path | str, **settings: Any) -> LLM:
        """Return an idle engine on the CPU without cached prompts.

        For tests that change nothing in it: they ask for answers, and look at it."""
        settings = {"device": "cpu"} | settings
        key = str(folder), repr(sorted(settings.items()))
        llm = self._engines.pop(key, None)
        if llm is None or not _reset(llm):
            llm = LLM(str(folder), **settings)
        self._engines[key] = llm
        while len(self._engines) > MOST_ENGINES:
            self._engines.popitem(last=False)[1].shutdown()
        return llm

    def close(self) -> None:
        while self._engines:
            self._engines.popitem()[1].shutdown()


def _reset(llm: LLM) -> bool:
    """Evict cached prompts. Return False if a test left requests in the engine or shut it down."""
    if llm._is_shut_down or llm._core.has_work:
        return False
    llm.reset_prefix_cache()
    return True


def core(llm: LLM) -> Any:
    """Return the `EngineCore`, or the `SeveralCores` of a data-parallel engine."""
    return llm._core


def scheduler(llm: LLM) -> Any:
    return llm._core.scheduler


def executor(llm: LLM) -> Any:
    return llm._core.executor


def worker(llm: LLM) -> Any:
    """Return the worker of an engine with one process."""
    return llm._core.executor._worker


def runner(llm: LLM) -> Any:
    return worker(llm).runner


def model(llm: LLM) -> Any:
    """Return our decoder, not Transformers' model."""
    return runner(llm).model


def kernels(llm: LLM) -> Any:
    """Return the table of kernels that inputs and sampling take."""
    return runner(llm).sampler.kernels


def graphs(llm: LLM) -> Any:
    """Return the captured graphs."""
    return runner(llm)._graphs


def replay(llm: LLM) -> Any:
    """Return the recorder of decode steps on a CPU; None if the model has none."""
    return model(llm)._replay


def recorded_steps(llm: LLM) -> dict[Any, Any]:
    """Return the decode steps that were recorded on a CPU."""
    return replay(llm)._recorded


def constraints(llm: LLM) -> Any:
    """Return the core's grammars."""
    return llm._core._constraints


def adapter_loads(llm: LLM) -> Any:
    """Return the core's adapters."""
    return llm._core._adapters


def kept_adapters(llm: LLM) -> Any:
    """Return the adapters that the core keeps in memory."""
    return adapter_loads(llm)._adapters


def forget_adapters(llm: LLM) -> None:
    """Forget all adapters, as a core that has started again."""
    kept_adapters(llm).clear()
    adapter_loads(llm)._places.clear()


def rank_pids(llm: LLM) -> list[int]:
    """Return the processes of this machine's ranks other than rank 0."""
    return [rank._process.pid for rank in executor(llm)._ranks]


def cores(llm: LLM) -> list[Any]:
    """Return the clients of a data-parallel engine's cores."""
    return [core.link for core in llm._core._pool.cores]


def count_stats(llm: LLM, name: str) -> Callable[[], float]:
    """Return a function that adds up this counter of all steps from now on."""
    owner, seen = scheduler(llm), []
    take = owner.take_stats

    def taking() -> Any:
        stats = take()
        seen.append(getattr(stats, name))
        return stats

    owner.take_stats = taking
    return lambda: sum(seen)


def grain(llm: LLM) -> int:
    """Return the tokens of which cached prefixes are multiples."""
    states, tables = scheduler(llm).states, scheduler(llm)._blocks
    return tables.grain if states is None else states.grain


def scarce(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings with fewer pages, and small chunks, if a model frees windows.

    Like others', the pool then has room for one request of full length, and little more."""
    described = describe(load_config(folder))
    layout = MemoryLayout.of(described.memory, settings.get("block_size", 16), 4, 4)
    length, step = settings.get("max_model_len", described.max_positions), 16
    layout = layout.with_groups(length, step)
    if "num_gpu_blocks_override" not in settings or not any(one.frees for one in layout.groups):
        return settings
    pages = layout.pages_of(length) + 3
    return settings | {"num_gpu_blocks_override": pages, "max_num_batched_tokens": step}
