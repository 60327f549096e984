"""What can be set of the engine: one frozen dataclass per concern, gathered in `EngineConfig`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from toolkit.config.fields import check_all, option, options
from toolkit.errors import ConfigError, did_you_mean

MOST_GIB = 2.0**20
"""More than any machine has; infinity is no size."""
MAX_SEED = 2**63 - 1
"""The greatest; of a request's, too."""
ENGINE = "TOOLKIT_ENGINE"
"""The variable that tells an engine's process which of --data-parallel-size it is."""
MEMORY = "TOOLKIT_MEMORY"
"""The variable that tells it, on a CPU, its share of the machine's memory in bytes: all that it may take, weights included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and how it is loaded."""

    model: str | None = option(
        None,
        "A folder or a hub name. Without one: the small demo model that ships with tk.",
        argument=True,
        metavar="MODEL",
        subject="Model",
        common=True,
    )
    revision: str | None = option(None, "Branch, tag or commit of the model on the hub.")
    tokenizer: str | None = option(
        None, "Folder or hub name of the tokenizer, when it is not the model's.", metavar="MODEL"
    )
    chat_template: str | None = option(
        None,
        "A file with the chat template, or the template itself. Default: the tokenizer's own.",
        metavar="FILE",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "Type of weights and activations. auto: the checkpoint's on a GPU; on a CPU bfloat16 for a checkpoint in it, else "
        "float32.",
        common=True,
    )
    max_model_len: int | None = option(
        None,
        "Longest prompt plus answer, in tokens. Default: what the model was made for.",
        minimum=1,
        common=True,
    )
    load_format: Literal["auto", "safetensors", "dummy"] = option(
        "auto",
        "auto: safetensors, else PyTorch files read without running code in them. dummy: random weights.",
    )
    quantization: Literal["fp8", "int8"] | None = option(
        None,
        "Type that the weights of linear layers are kept in, rounded while the model is loaded: half of 16 bits. fp8: on "
        "GPUs. int8: on CPUs. Default: the type of the activations.",
    )
    pooling: Literal["last", "mean", "cls"] | None = option(
        None,
        "Whose hidden state is a text's embedding: the last token's, the mean of all, or the first token's. Has a "
        "model that generates answer /v1/embeddings, too. Default: what the model's folder says.",
    )
    seed: int = option(
        0,
        "Seeds every random choice for which a request names no seed.",
        minimum=0,
        maximum=MAX_SEED,
    )

    def __post_init__(self) -> None:
        check_all(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """Where the model runs."""

    device: Literal["auto", "cuda", "cpu"] = option(
        "auto", "auto: the first GPU, else the CPU.", subject="Device"
    )
    attention_backend: Literal["auto", "torch", "cpu", "triton", "flash"] = option(
        "auto",
        "Which attention runs; auto chooses for the device, and a log line says which and why.",
    )
    enforce_eager: bool = option(False, "Run every step kernel by kernel, without CUDA graphs.")
    num_threads: int | None = option(
        None, "CPU threads for the model. Default: the cores it may use.", minimum=1, maximum=1024
    )

    def __post_init__(self) -> None:
        check_all(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV cache."""

    block_size: int = option(
        16, "Tokens in one KV cache block.", minimum=1, maximum=256, subject="KV cache"
    )
    gpu_memory_utilization: float = option(
        0.9,
        "Share of the GPU's memory to use. It holds weights, activations and KV cache together.",
        minimum=0.05,
        maximum=1.0,
        common=True,
    )
    kv_cache_memory: float | None = option(
        None,
        "KV cache size in GiB, instead of measuring what is free.",
        minimum=0.0,
        maximum=MOST_GIB,
    )
    kv_cache_dtype: Literal["auto", "fp8"] = option(
        "auto",
        "Type of the KV cache. auto: the activations'. fp8: half of 16 bits, so twice the tokens.",
    )
    num_gpu_blocks_override: int | None = option(
        None, "KV cache size in blocks, whatever memory there is (for tests).", minimum=1
    )
    swap_space: float | None = option(
        None,
        "Host memory in GiB for the blocks of preempted requests. Default: 4 on a GPU, 0 on a CPU.",
        minimum=0.0,
        maximum=MOST_GIB,
    )
    enable_prefix_caching: bool = option(True, "Reuse the KV cache of prompts that begin alike.")

    def __post_init__(self) -> None:
        check_all(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Who runs next."""

    max_num_seqs: int = option(
        256, "Most requests that run at once.", minimum=1, subject="Scheduling", common=True
    )
    max_num_batched_tokens: int | None = option(
        None, "Token budget of one step. Default: 8192 on a GPU, 2048 on a CPU.", minimum=1
    )
    scheduling_policy: Literal["fcfs", "priority"] = option(
        "fcfs", "fcfs: first come, first served. priority: lower numbers first."
    )
    async_scheduling: bool | None = option(
        None,
        "Schedule the next step before this one's tokens are known. Default: on for a GPU. With --pipeline-parallel-size there is "
        "a step for each stage instead.",
    )

    def __post_init__(self) -> None:
        check_all(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Over how many devices."""

    tensor_parallel_size: int = option(
        1,
        "Devices that share every layer of the model: GPUs, or processes on a CPU.",
        minimum=1,
        subject="Parallelism",
    )
    pipeline_parallel_size: int = option(
        1,
        "Devices, or groups of --tensor-parallel-size of them, over which the model's layers are shared out in a row.",
        minimum=1,
    )
    data_parallel_size: int = option(
        1,
        "Engines behind one server, each with the whole model on devices of its own. A request goes to the one that knows "
        "its prompt's beginning, or has the least to do.",
        minimum=1,
    )
    distributed_executor_backend: Literal["mp", "ray"] = option(
        "mp",
        "How the processes of devices are started. mp: by this one, on this machine. ray: on the machines of a Ray cluster "
        "(pip install 'tk-llm[ray]').",
    )
    worker_timeout: float = option(
        300.0,
        "Seconds that a step may take before its devices are taken for hung and the engine is started again.",
        minimum=1.0,
    )

    def __post_init__(self) -> None:
        check_all(self)

    @property
    def world_size(self) -> int:
        """Ranks of one engine. A rank's number is stage · tensor_parallel_size + its number in the stage."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_devices(self) -> int:
        """Of all engines together."""
        return self.world_size * self.data_parallel_size

    @property
    def num_devices_here(self) -> int:
        """Of those on this machine: one at least of a cluster's, which are not looked up and taken to be alike."""
        return self.num_devices if self.distributed_executor_backend == "mp" else 1

    @property
    def delivering_rank(self) -> int:
        """Whose results are told: the first of the last stage, which samples."""
        return self.world_size - self.tensor_parallel_size


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All of the engine's settings."""

    model: ModelConfig = field(default_factory=ModelConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> EngineConfig:
        """From flat settings, as `LLM(model, max_num_seqs=8)` or a command line gives them.

        Raises ConfigError for an unknown name or a value out of bounds.
        """
        known = {row.name for part in PARTS.values() for row in options(part)}
        for name in settings:
            if name not in known:
                raise ConfigError(
                    f"There is no setting {name!r}.{did_you_mean(name, known)}", param=name
                )
        parts = {
            key: part(
                **{row.name: settings[row.name] for row in options(part) if row.name in settings}
            )
            for key, part in PARTS.items()
        }
        return cls(**parts)

    def with_settings(self, **settings: Any) -> EngineConfig:
        """A copy with some settings changed."""
        flat = {
            row.name: getattr(getattr(self, key), row.name)
            for key, part in PARTS.items()
            for row in options(part)
        }
        return self.from_settings(flat | settings)


PARTS: dict[str, type] = {
    f.name: f.default_factory  # type: ignore[misc]  # every part's factory is its own class
    for f in dataclasses.fields(EngineConfig)
}
