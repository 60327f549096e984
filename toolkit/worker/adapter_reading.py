"""Read LoRA adapters into the host's memory: at the start, and while steps run."""

from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path

import torch

from toolkit.config import EngineConfig
from toolkit.config.engine import LoRAConfig
from toolkit.lora.adapters import Adapters
from toolkit.lora.files import find_adapter
from toolkit.lora.gpu_weight import GPUActive
from toolkit.lora.peft import SlotSize, slot_size
from toolkit.lora.tokenizer import require_same_tokenizer
from toolkit.sequence import Adapter
from toolkit.worker.operations import LoadAdapter, Operation

NUM_THREADS = 2  # a large adapter does not hold up all others


def find_slot_size(config: LoRAConfig) -> SlotSize:
    """Return what each slot has room for. Raises CheckpointError for --lora-modules."""
    found = [find_adapter(name, Path(path)) for name, path in config.adapters.items()]
    return slot_size({one.name: Path(one.folder) for one in found}, config)


class AdapterReader:
    """Reads adapters for one worker, and drops them."""

    def __init__(self, adapters: Adapters, config: EngineConfig, folder: Path) -> None:
        """`folder`: of the base model."""
        self._adapters, self._config = adapters, config.lora
        tokenizer = config.model.tokenizer
        self._tokenizer = folder if tokenizer is None else Path(tokenizer)

    def read_modules(self) -> list[Adapter]:
        """Read --lora-modules and return them. The first of them stay in memory."""
        found: list[Adapter] = []
        for name, path in self._config.adapters.items():
            adapter = find_adapter(name, Path(path))
            self._read(adapter)
            if len(found) >= self._config.num_in_memory:
                self._adapters.forget(adapter)
            found.append(adapter)
        return found

    def operate(self, operation: Operation) -> Future[None]:
        """Do an operation. Between steps; the next ones may run before the result is there."""
        if isinstance(operation, LoadAdapter):
            return self._threads.submit(self._read, operation.adapter)
        self._adapters.forget(operation.adapter)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        # On a GPU, more threads of PyTorch's would only disturb the one that launches steps.
        on_gpu = isinstance(self._adapters.active, GPUActive)
        first = partial(torch.set_num_threads, 1) if on_gpu else None
        return ThreadPoolExecutor(NUM_THREADS, "adapters", first)

    def _read(self, adapter: Adapter) -> None:
        require_same_tokenizer(adapter, self._tokenizer)
        self._adapters.read(adapter)
