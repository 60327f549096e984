"""Whether a device has room for a model, and for how many tokens of KV cache: the worker's arithmetic, before it runs.

Weights and cache are exact. What a step takes beside them is measured by the worker on a GPU, and estimated here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toolkit.config import EngineConfig
from toolkit.config.engine import ParallelConfig
from toolkit.errors import CheckpointError, ConfigError
from toolkit.hardware.devices import Device
from toolkit.hardware.figures import CPU_CACHE_SHARE, SAMPLING_BYTES
from toolkit.inventory.checkpoint import TYPE_BYTES, Checkpoint, Tensor
from toolkit.models.model_config import auto_dtype
from toolkit.models.pipeline_split import share_out
from toolkit.units import size

CPU_RUNTIME = 400 * 2**20
"""What the server's processes take on a CPU, beside weights and cache: 223 MiB when idle (2026-11-21)."""
CUDA_RUNTIME = 700 * 2**20
"""The driver's context, kernels and work spaces of one process."""
GIB = 2**30
_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
"""In a decoder's names of tensors: which layer it is of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Sizes in bytes, of one device where there are several: of that stage whose cache holds the least; lengths in tokens."""

    device: Device
    parallel: ParallelConfig
    dtype: str
    num_parameters: int
    weights: int
    step: int
    """What the largest step takes beside the weights, and what the process takes anyway."""
    block_size: int
    num_blocks: int
    block_bytes: int
    max_model_len: int
    max_positions: int
    has_cache: bool

    @property
    def weights_fit(self) -> bool:
        return self.weights + self.step <= self.device.free

    @property
    def cache(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def num_tokens(self) -> int:
        """What the cache holds."""
        return self.num_blocks * self.block_size

    @property
    def largest_context(self) -> int:
        """The longest sequence that fits, at most what the model was made for; 0 when none does."""
        if not self.weights_fit:
            return 0
        return min(self.max_positions, self.num_tokens) if self.has_cache else self.max_positions

    @property
    def sequences(self) -> float:
        """How many of the full length the cache holds."""
        return self.num_tokens / self.max_model_len if self.has_cache else 0.0

    @property
    def fits(self) -> bool:
        return self.largest_context >= self.max_model_len

    @property
    def problem(self) -> str | None:
        """What is too large, and what to do."""
        if self.fits:
            return None
        if not self.weights_fit:
            half = " Half of that with --dtype bfloat16." if self.dtype == "float32" else ""
            return (
                f"The weights take {size(self.weights)} in {self.dtype} and a step {size(self.step)}; "
                f"{size(self.device.free)} of {self.device.kind} memory are free.{half}"
            )
        advice = (
            f"Use --max-model-len {self.num_tokens} or less, or give" if self.num_tokens else "Give"
        )
        return (
            f"The KV cache has room for {self.num_tokens:,} tokens ({size(self.cache)}), and one request of the full "
            f"length has {self.max_model_len:,}. {advice} the cache more memory (--gpu-memory-utilization, --kv-cache-memory)."
        )


def estimate(checkpoint: Checkpoint, engine: EngineConfig, device: Device) -> Estimate:
    """Raises CheckpointError for a model that tk does not run or whose size nothing tells, ConfigError for settings
    that do not fit it.
    """
    config: Any = checkpoint.config
    if device.kind == "cpu":
        here = engine.parallel.num_devices_here
        device = dataclasses.replace(device, total=device.total // here, free=device.free // here)
    wanted, on_gpu = engine.model.dtype, device.kind != "cpu"
    dtype = auto_dtype(checkpoint.config, on_gpu=on_gpu) if wanted == "auto" else wanted
    max_model_len = _max_model_len(checkpoint, engine)
    stages = _stages(checkpoint, engine, dtype)
    _, heads, head_size = checkpoint.cache_shape
    cache_type = dtype if engine.cache.kv_cache_dtype == "auto" else engine.cache.kv_cache_dtype
    ranks = engine.parallel.tensor_parallel_size
    heads = (
        max(1, heads // ranks) if heads else 0
    )  # fewer heads than ranks: several ranks have the same one
    layer_bytes = 2 * engine.cache.block_size * heads * head_size * TYPE_BYTES[cache_type]
    step = _step_bytes(config, engine, dtype, device)

    def blocks_of(weights: int, layers: int) -> int:
        block_bytes = layers * layer_bytes
        if not block_bytes:
            return 0
        return _num_blocks(engine, device, weights, step, block_bytes, max_model_len)

    # The tightest stage: one whose weights do not fit at all, else the one with the fewest blocks.
    weights, layers = min(
        stages, key=lambda stage: (stage[0] + step <= device.free, blocks_of(*stage), -stage[0])
    )
    num_blocks, block_bytes = blocks_of(weights, layers), layers * layer_bytes
    return Estimate(
        device=device,
        parallel=engine.parallel,
        dtype=dtype,
        num_parameters=checkpoint.num_parameters or 0,
        weights=weights,
        step=step,
        block_size=engine.cache.block_size,
        num_blocks=num_blocks,
        block_bytes=block_bytes,
        max_model_len=max_model_len,
        max_positions=checkpoint.max_positions,
        has_cache=block_bytes > 0,
    )


def _stages(checkpoint: Checkpoint, engine: EngineConfig, dtype: str) -> list[tuple[int, int]]:
    """(what one rank's weights take once they are loaded, but for padding; number of layers) of each stage."""
    count, layers = engine.parallel.pipeline_parallel_size, checkpoint.cache_shape[0]
    nbytes = _counter(checkpoint, engine, dtype)
    if count == 1:
        return [(sum(map(nbytes, checkpoint.weights)), layers)]
    if not layers:
        raise ConfigError(
            f"--pipeline-parallel-size {count}: encoders run whole on one device.",
            param="pipeline_parallel_size",
        )
    of_layers, first, last = dict.fromkeys(range(layers), 0), 0, 0
    tables = [tensor for tensor in checkpoint.weights if tensor.is_vocabulary]
    head = nbytes(next((tensor for tensor in tables if "lm_head." in tensor.name), tables[0]))
    for tensor in checkpoint.weights:
        found = _LAYER.search(tensor.name)
        if found is not None:
            index = int(found[1])
            if index >= layers:
                raise CheckpointError(
                    f"{checkpoint.name} has a tensor {tensor.name}, and {layers} layers."
                )
            of_layers[index] += nbytes(tensor)
        elif tensor.is_table:
            first += nbytes(tensor)
        else:
            last += nbytes(tensor)
    if getattr(checkpoint.config, "tie_word_embeddings", False):
        last += head
    counts = share_out(layers, count, of_layers[0], head)
    begins = [sum(counts[:index]) for index in range(count)]
    weights = [
        sum(of_layers[i] for i in range(begin, begin + n))
        for begin, n in zip(begins, counts, strict=True)
    ]
    weights[0] += first
    weights[-1] += last
    return list(zip(weights, counts, strict=True))


def _counter(checkpoint: Checkpoint, engine: EngineConfig, dtype: str) -> Callable[[Tensor], int]:
    """What one rank's part of a tensor takes. int8 rounds the output head, too."""
    quantization, num_ranks = engine.model.quantization, engine.parallel.tensor_parallel_size
    tied = bool(getattr(checkpoint.config, "tie_word_embeddings", False))

    def number(tensor: Tensor) -> int:
        is_head = tensor.is_vocabulary and (tied or "lm_head." in tensor.name)
        rounded = tensor.is_linear or (is_head and quantization == "int8")
        return TYPE_BYTES[quantization if quantization and rounded else dtype]

    def share(tensor: Tensor) -> int:
        return (
            -(-tensor.size // num_ranks)
            if tensor.is_linear or tensor.is_vocabulary
            else tensor.size
        )

    return lambda tensor: share(tensor) * number(tensor)


def _max_model_len(checkpoint: Checkpoint, engine: EngineConfig) -> int:
    wanted = engine.model.max_model_len
    if wanted is not None and wanted > checkpoint.max_positions:
        raise ConfigError(
            f"--max-model-len is {wanted}, and the model was made for at most {checkpoint.max_positions} tokens.",
            param="max_model_len",
        )
    found = wanted or checkpoint.context
    if found is None:
        raise CheckpointError(
            f"{checkpoint.name}: config.json does not say how long a sequence may be."
        )
    return found


def _step_bytes(config: Any, engine: EngineConfig, dtype: str, device: Device) -> int:
    """The largest step's hidden states, logits and what sampling takes, and the process itself."""
    on_gpu = device.kind == "cuda"
    tokens = engine.scheduler.max_num_batched_tokens or (8192 if on_gpu else 2048)
    requests = min(engine.scheduler.max_num_seqs, tokens)
    inner: int = (
        getattr(config, "intermediate_size", None)
        or getattr(config, "n_inner", None)
        or 4 * config.hidden_size
    )
    width = 4 * int(config.hidden_size) + 2 * inner
    logits = requests * int(config.vocab_size) * (TYPE_BYTES[dtype] + SAMPLING_BYTES)
    return tokens * width * TYPE_BYTES[dtype] + logits + (CUDA_RUNTIME if on_gpu else CPU_RUNTIME)


def _num_blocks(
    engine: EngineConfig,
    device: Device,
    weights: int,
    step: int,
    block_bytes: int,
    max_model_len: int,
) -> int:
    cache = engine.cache
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override
    if cache.kv_cache_memory is not None:
        return int(cache.kv_cache_memory * GIB) // block_bytes
    if device.kind == "cuda":
        others = device.total - device.free
        room = int(device.total * cache.gpu_memory_utilization) - others - weights - step
        return max(0, room) // block_bytes
    room = int(max(0, device.free - weights - CPU_RUNTIME) * CPU_CACHE_SHARE)
    most_useful = engine.scheduler.max_num_seqs * -(-max_model_len // cache.block_size)
    return min(room // block_bytes, most_useful)
