"""Engine settings: one frozen dataclass per concern, combined in `EngineConfig`."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from toolkit.config.fields import check_all, option, options
from toolkit.config.speculation import SpeculationConfig
from toolkit.errors import ConfigError, did_you_mean

DEMO = "tk-demo"
"""Name of the demo model, unless there is a folder of that name."""
MAX_GIB = 2.0**20  # more than any machine has; rejects infinity
MAX_SEED = 2**63 - 1  # also for requests
MAX_PICTURES = 4  # in a prompt, by default
MAX_LOGPROBS = 100  # of a token
REQUEST_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling parameters that a model's generation_config.json sets for requests without them."""
OUTPUT_LIMIT = "max_new_tokens"
"""Field of --override-generation-config that limits the output tokens of all requests."""
LATEST = ":latest"
"""Tag that Ollama adds to names without one."""
ENGINE_VARIABLE = "TOOLKIT_ENGINE"
"""Environment variable with an engine process's index among --data-parallel-size engines."""
MEMORY_VARIABLE = "TOOLKIT_MEMORY"
"""Environment variable with the memory budget of an engine on a CPU: bytes, weights included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model, and how it is loaded."""

    model: str | None = option(
        None,
        "Model folder, GGUF file or hub name. Default: the small demo model that ships with tk.",
        argument=True,
        aliases=("-m",),
        metavar="MODEL",
        subject="Model",
        common=True,
    )
    revision: str | None = option(None, "Branch, tag or commit of the model on the hub.")
    tokenizer: str | None = option(
        None, "Folder or hub name of the tokenizer. Default: the model's.", metavar="MODEL"
    )
    chat_template: str | None = option(
        None,
        "Chat template: a file, or the template itself. Default: the tokenizer's.",
        metavar="FILE",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "Type of weights and activations. auto: on a GPU the checkpoint's 16-bit type, else "
        "bfloat16; on a CPU bfloat16 if the checkpoint has that type, as quantized GGUF files do, "
        "else float32.",
        common=True,
    )
    max_model_len: int | None = option(
        None,
        "Maximum prompt plus output, in tokens. Default: the model's own maximum.",
        minimum=1,
        common=True,
    )
    hf_overrides: Mapping[str, Any] | None = option(
        None,
        "Fields that replace those of the model's config.json, as a JSON object. null removes one.",
        metavar="JSON",
    )
    rope_scaling: Mapping[str, Any] | None = option(
        None,
        "Scaling of rotary positions, for a longer context: a JSON object such as "
        '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}. The '
        "model's rope_theta is kept. With yarn the model's maximum length becomes factor times the "
        "original one.",
        metavar="JSON",
    )
    model_impl: Literal["auto", "toolkit", "transformers"] = option(
        "auto",
        "Code that computes the model. toolkit: tk's own. transformers: Transformers', with tk's "
        "attention and cache; slower. auto: tk's own if it has the architecture.",
    )
    trust_remote_code: bool = option(
        False,
        "Run the Python code in the model's folder, if Transformers lacks its architecture. That "
        "code has all rights of this process.",
    )
    load_format: Literal["auto", "safetensors", "dummy"] = option(
        "auto",
        "Format of the weight files. auto: safetensors, else PyTorch files, read without running "
        "any code in them. dummy: random weights.",
    )
    quantization: Literal["fp8", "int8", "int4"] | None = option(
        None,
        "Quantize the weights of linear layers while loading, if the checkpoint has full "
        "precision. fp8: 8 bits, on GPUs. int8: 8 bits, on CPUs. int4: 4 bits in groups of 128. "
        "Default: keep them as they are stored.",
    )
    pooling: Literal["last", "mean", "cls"] | None = option(
        None,
        "Pooling of hidden states into an embedding: the last token's, the mean of all, or the "
        "first token's (cls). With it a generative model also serves /v1/embeddings. Default: as "
        "the model's folder specifies.",
    )
    generation_config: str | None = option(
        None,
        "Folder whose generation_config.json has the defaults of requests, such as temperature and "
        "top_p; none: there are none. Default: the model's folder.",
        metavar="FOLDER",
    )
    override_generation_config: Mapping[str, Any] | None = option(
        None,
        'Defaults of requests that replace those, as a JSON object such as {"temperature": 0.6}. '
        f"Fields: {', '.join(REQUEST_DEFAULTS)}. {OUTPUT_LIMIT} limits the output tokens of every "
        "request, also of those that ask for more.",
        metavar="JSON",
    )
    max_logprobs: int = option(
        MAX_LOGPROBS,
        "Most log-probabilities of a token that a request may ask for, its prompt's too. Beam "
        "search needs as many as it has beams and end tokens.",
        minimum=0,
        maximum=MAX_LOGPROBS,
    )
    seed: int = option(
        0,
        "Seed for sampling, for requests without a seed of their own.",
        minimum=0,
        maximum=MAX_SEED,
    )

    def __post_init__(self) -> None:
        check_all(self)
        if self.model is not None:
            object.__setattr__(self, "model", without_latest(self.model))
        known = (*REQUEST_DEFAULTS, OUTPUT_LIMIT)
        overrides = self.override_generation_config or {}
        for name in overrides:
            if name not in known:
                raise ConfigError(
                    f"--override-generation-config: unknown field {name!r}; known: "
                    f"{', '.join(known)}.{did_you_mean(name, known)}",
                    param="override_generation_config",
                )
        limit = overrides.get(OUTPUT_LIMIT, 1)
        if type(limit) is not int or limit < 1:
            raise ConfigError(
                f"--override-generation-config: {OUTPUT_LIMIT} must be a whole number of at least "
                f"1; got {limit!r}.",
                param="override_generation_config",
            )

    @property
    def overrides(self) -> dict[str, Any]:
        """Fields that replace those of config.json."""
        rope = {} if self.rope_scaling is None else {"rope_scaling": self.rope_scaling}
        return {**(self.hf_overrides or {}), **rope}


def without_latest(name: str) -> str:
    """Return a model's name without Ollama's tag `:latest`, unless it is a path that exists."""
    return name if os.path.exists(name) else name.removesuffix(LATEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """The device that the model runs on."""

    device: Literal["auto", "cuda", "cpu"] = option(
        "auto", "Device to run on. auto: the first GPU, else the CPU.", subject="Device"
    )
    attention_backend: Literal["auto", "torch", "cpu", "triton", "flash"] = option(
        "auto",
        "Attention implementation. auto: chosen for the device; the log says which one and why.",
    )
    enforce_eager: bool = option(
        False,
        "Launch kernels one by one, without CUDA graphs and, on a CPU, without recorded steps.",
    )
    num_threads: int | None = option(
        None,
        "CPU threads that run the model. Default: one per available core.",
        minimum=1,
        maximum=1024,
    )

    def __post_init__(self) -> None:
        check_all(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV cache."""

    block_size: int = option(
        16, "Tokens per KV cache block.", minimum=1, maximum=256, subject="KV cache"
    )
    gpu_memory_utilization: float = option(
        0.9,
        "Fraction of the GPU's memory to use. Weights, activations and KV cache share it.",
        minimum=0.05,
        maximum=1.0,
        common=True,
    )
    kv_cache_memory: float | None = option(
        None,
        "KV cache size in GiB. Default: set from the free memory that is measured at startup.",
        minimum=0.0,
        maximum=MAX_GIB,
    )
    kv_cache_dtype: Literal["auto", "fp8"] = option(
        "auto",
        "Data type of the KV cache. auto: that of the activations. fp8: half the size of a 16-bit "
        "type, so the cache holds twice the tokens.",
    )
    num_gpu_blocks_override: int | None = option(
        None, "KV cache size in blocks, regardless of free memory (for tests).", minimum=1
    )
    swap_space: float | None = option(
        None,
        "Host memory in GiB for blocks of preempted requests, and their states (up to half). "
        "Default: 4 on a GPU, 0 on a CPU.",
        minimum=0.0,
        maximum=MAX_GIB,
    )
    enable_prefix_caching: bool = option(True, "Reuse the KV cache of shared prefixes.")
    mamba_ssm_cache_dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto",
        "Data type of the states of recurrent layers. auto: float32. bfloat16 takes half the "
        "memory, and rounds each state in each step.",
    )
    state_cache_gib: float | None = option(
        None,
        "Memory in GiB for states after prompts, of models with recurrent layers: with them, a "
        "shared prefix is reused. Default: a quarter of the cache's memory.",
        minimum=0.0,
        maximum=MAX_GIB,
    )

    @property
    def state_type(self) -> Literal["float32", "bfloat16"]:
        """Type of the states of recurrent layers."""
        wanted = self.mamba_ssm_cache_dtype
        return "float32" if wanted == "auto" else wanted

    def __post_init__(self) -> None:
        check_all(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits and order of scheduling."""

    max_num_seqs: int = option(
        256, "Maximum number of running requests.", minimum=1, subject="Scheduling", common=True
    )
    max_num_batched_tokens: int | None = option(
        None, "Token budget of a step. Default: 8192 on a GPU, 2048 on a CPU.", minimum=1
    )
    scheduling_policy: Literal["fcfs", "priority"] = option(
        "fcfs",
        "Order in which waiting requests run. fcfs: first come, first served. priority: lowest "
        "priority number first.",
    )
    async_scheduling: bool | None = option(
        None,
        "Schedule the next step before the tokens of the current one are known. Default: on for a "
        "GPU. With --pipeline-parallel-size one step per stage is in flight instead.",
    )

    def __post_init__(self) -> None:
        check_all(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """The number of devices, and how the model is split over them."""

    tensor_parallel_size: int = option(
        1,
        "Devices that each layer of the model is sharded over: GPUs, or processes on a CPU.",
        minimum=1,
        subject="Parallelism",
    )
    pipeline_parallel_size: int = option(
        1,
        "Pipeline stages that the model's layers are split into. Each stage has "
        "--tensor-parallel-size devices.",
        minimum=1,
    )
    enable_expert_parallel: bool = option(
        False,
        "Give each of the --tensor-parallel-size devices complete experts, instead of a part of "
        "every expert. For models with experts.",
    )
    data_parallel_size: int = option(
        1,
        "Engines behind one server, each with a full copy of the model on its own devices. A "
        "request goes to the engine that has its prefix cached, or to the least loaded one.",
        minimum=1,
    )
    distributed_executor_backend: Literal["mp", "ray"] = option(
        "mp",
        "How worker processes are started. mp: by this process, on this machine. ray: on the "
        "machines of a Ray cluster (pip install '.[ray]' in tk's checkout).",
    )
    worker_timeout: float = option(
        300.0,
        "Seconds after which a step counts as hung. The engine is then restarted.",
        minimum=1.0,
    )

    def __post_init__(self) -> None:
        check_all(self)

    @property
    def world_size(self) -> int:
        """Ranks of one engine. Rank = stage · tensor_parallel_size + rank within the stage."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_devices(self) -> int:
        """Devices of all engines together."""
        return self.world_size * self.data_parallel_size

    @property
    def num_local_devices(self) -> int:
        """Devices on this machine. With Ray 1: the cluster is not queried."""
        return self.num_devices if self.distributed_executor_backend == "mp" else 1

    @property
    def output_rank(self) -> int:
        """Rank whose results are used: the first of the last stage, which samples."""
        return self.world_size - self.tensor_parallel_size


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginConfig:
    """Plug-ins of the engine."""

    logits_processors: tuple[str, ...] = option(
        (),
        "Logits processor that requests may ask for with vllm_xargs, next to those of installed "
        "packages. May be repeated.",
        metavar="MODULE:CLASS",
        subject="Plug-ins",
    )
    strict_plugins: bool = option(
        False, "Refuse to start if a plug-in of an installed package is broken."
    )

    def __post_init__(self) -> None:
        check_all(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAConfig:
    """LoRA adapters."""

    lora_modules: tuple[str, ...] = option(
        (),
        "LoRA adapter in PEFT's format to serve next to the model, by a name that requests use as "
        'their model: a folder or a name on the hub. May be repeated, or JSON: {"name": "sql", '
        '"path": "./sql"}.',
        metavar="NAME=PATH",
        subject="Adapters",
    )
    lora_dir: str | None = option(
        None,
        "Folder of LoRA adapters. A request that names one of its folders as its model loads it.",
        metavar="FOLDER",
    )
    enable_lora: bool = option(
        False,
        "Accept LoRA adapters that LLM.generate brings. Implied by the other options for adapters.",
    )
    allow_runtime_lora: bool = option(
        False,
        "Let operators change adapters by /v1/load_lora_adapter and /v1/unload_lora_adapter. These "
        "need the admin key; without --admin-key they are open to every client. Paths must be "
        "inside --lora-dir, or one of --lora-modules.",
    )
    max_loras: int = option(
        8,
        "Most adapters in one step. Requests with others wait. On a GPU each has memory of its "
        "own.",
        minimum=1,
        maximum=1024,
    )
    max_cpu_loras: int | None = option(
        None,
        "Most adapters in the host's memory. Others are read from disk when a request needs them. "
        "Default: 64, or --max-loras if that is more.",
        minimum=1,
        maximum=65536,
    )
    max_lora_rank: int | None = option(
        None,
        "Highest rank of an adapter. Default: the highest of --lora-modules, at least 16.",
        minimum=1,
        maximum=1024,
    )
    lora_embeddings: bool | None = option(
        None,
        "Accept adapters that change embeddings or the output head. On a GPU they need more "
        "memory. Default: on for a CPU, or if one of --lora-modules changes them.",
    )

    def __post_init__(self) -> None:
        check_all(self)
        _adapters(self.lora_modules)
        if self.allow_runtime_lora and self.lora_dir is None and not self.lora_modules:
            raise ConfigError(
                "--allow-runtime-lora needs --lora-dir or --lora-modules: no other adapters may be "
                "loaded.",
                param="allow_runtime_lora",
            )
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"--max-cpu-loras is {self.max_cpu_loras}, less than --max-loras "
                f"({self.max_loras}): adapters in use are in the host's memory, too.",
                param="max_cpu_loras",
            )

    @property
    def is_enabled(self) -> bool:
        """True if requests may have adapters."""
        return bool(self.lora_modules or self.lora_dir or self.enable_lora)

    @property
    def adapters(self) -> dict[str, str]:
        """Paths, or names on the hub, of --lora-modules by the adapters' names."""
        return {name: module.path for name, module in _adapters(self.lora_modules).items()}

    @property
    def base_names(self) -> set[str]:
        """Names of the base model that --lora-modules give in JSON."""
        modules = _adapters(self.lora_modules).values()
        return {one.base_model_name for one in modules if one.base_model_name is not None}

    @property
    def num_in_memory(self) -> int:
        """Most adapters in the host's memory."""
        return self.max_cpu_loras or max(DEFAULT_CPU_LORAS, self.max_loras)


DEFAULT_CPU_LORAS = 64


class _Module(msgspec.Struct, forbid_unknown_fields=True):
    """An adapter of --lora-modules as JSON. The fields are vLLM's."""

    name: str
    path: str
    base_model_name: str | None = None


def _adapters(modules: Iterable[str]) -> dict[str, _Module]:
    """Parse --lora-modules. Raises ConfigError."""
    found: dict[str, _Module] = {}
    for module in modules:
        problem, one = None, _Module("", "")
        if module.lstrip().startswith("{"):
            try:
                one = msgspec.json.decode(module, type=_Module)
            except msgspec.DecodeError as error:
                problem = f"{module!r} is no adapter in JSON: {error}"
        else:
            name, _, path = module.partition("=")
            one = _Module(name, path)
        if problem is None and not (one.name and one.path):
            problem = f"{module!r} must be a name and a path, NAME=PATH"
        elif one.name in found:
            problem = f"two adapters are called {one.name!r}"
        if problem is not None:
            raise ConfigError(f"--lora-modules: {problem}.", param="lora_modules")
        found[one.name] = one
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureConfig:
    """Pictures in prompts."""

    limit_mm_per_prompt: Mapping[str, Any] | None = option(
        None,
        'Most pictures in one prompt, as image=4 or {"image": 4}. image=0: the model reads text '
        f"alone, and its tower takes no memory. Default: image={MAX_PICTURES}.",
        metavar="image=N",
        subject="Pictures",
    )
    mm_cache_gib: float = option(
        1.0,
        "Memory for encoded pictures in GiB, at least that of the largest. Requests with the same "
        "picture share it.",
        minimum=0.0,
        maximum=MAX_GIB,
    )
    mm_processor_kwargs: Mapping[str, Any] | None = option(
        None,
        "Settings that replace those of the model's image processor, as a JSON object such as "
        '{"max_pixels": 1003520}.',
        metavar="JSON",
    )
    allowed_local_media_path: str | None = option(
        None,
        "Folder below which file: URLs of pictures may be. Default: there are none.",
        metavar="FOLDER",
    )
    allowed_media_domains: tuple[str, ...] = option(
        (),
        "Host whose pictures may be fetched by http and https. A leading dot allows all below it. "
        "May be repeated. Default: none; data: URLs always work.",
        metavar="HOST...",
    )

    def __post_init__(self) -> None:
        check_all(self)
        limits = self.limit_mm_per_prompt or {}
        others = any(number for kind, number in limits.items() if kind != "image")
        number = self.most_pictures
        if others or type(number) is not int or not 0 <= number <= 1024:
            raise ConfigError(
                f'--limit-mm-per-prompt must be like image=4 or {{"image": 4}}, at most 1024, and '
                f"other kinds 0; got {json.dumps(limits)}.",
                param="limit_mm_per_prompt",
            )

    @property
    def most_pictures(self) -> int:
        """Most pictures in one prompt."""
        number: int = (self.limit_mm_per_prompt or {}).get("image", MAX_PICTURES)
        return number


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All engine settings."""

    model: ModelConfig = field(default_factory=ModelConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    plugins: PluginConfig = field(default_factory=PluginConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    pictures: PictureConfig = field(default_factory=PictureConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> EngineConfig:
        """Build from flat settings, such as those of `LLM(model, max_num_seqs=8)`.

        vLLM's names and values are translated. Raises ConfigError for an unknown name or a value
        out of bounds."""
        from toolkit.config.server import ServerConfig
        from toolkit.config.vllm import translate_settings

        known = {row.name for part in PARTS.values() for row in options(part)}
        settings = translate_settings(settings, known)
        for name in settings:
            if name in {row.name for row in options(ServerConfig)}:
                raise ConfigError(
                    f"{name} is a setting of servers alone. Leave it out here.", param=name
                )
            if name not in known:
                raise ConfigError(
                    f"Unknown setting {name!r}.{did_you_mean(name, known)}", param=name
                )
        parts = {
            key: part(
                **{row.name: settings[row.name] for row in options(part) if row.name in settings}
            )
            for key, part in PARTS.items()
        }
        return cls(**parts)

    def with_settings(self, **settings: Any) -> EngineConfig:
        """Return a copy with some settings changed."""
        flat = {
            row.name: getattr(getattr(self, key), row.name)
            for key, part in PARTS.items()
            for row in options(part)
        }
        return self.from_settings(flat | settings)


PARTS: dict[str, type] = {
    f.name: f.default_factory  # type: ignore[misc]  # each default factory is the part's class
    for f in dataclasses.fields(EngineConfig)
}
