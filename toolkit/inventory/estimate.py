"""Estimate whether a model fits on a device, and the size of its KV cache, before it is loaded.

Sizes of weights and cache are exact. The memory of a step is estimated (`step_memory`); on a GPU
the worker measures it. The arithmetic is the worker's: weights from the headers of the safetensors
files (of a model on the hub by range requests), the cache from config.json, free memory from NVML
or the system. Tests compare the results with a worker's `WorkerInfo`."""

import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from toolkit import hub
from toolkit.cache_group import most_step
from toolkit.config import CacheConfig, EngineConfig
from toolkit.config.engine import LoRAConfig, ParallelConfig
from toolkit.errors import CheckpointError, ConfigError
from toolkit.hardware.devices import Device, find_device
from toolkit.hardware.figures import CPU_CACHE_SHARE
from toolkit.inventory.checkpoint import TYPE_BYTES, Checkpoint
from toolkit.inventory.step_memory import CPU_RUNTIME, Drafting, StepMemory, step_tokens
from toolkit.inventory.tower_memory import encoder_step, sound_memory, tower_memory
from toolkit.lora.files import LEAST_MAX_RANK
from toolkit.models.config.model_config import name_weights, resolve_dtype
from toolkit.models.describe import Decoder, Encoder, External, Parameter, memory_of
from toolkit.models.memory import Memory, MemoryLayout
from toolkit.models.pipeline_split import split_layers
from toolkit.units import size
from toolkit.weights.formats import Packings
from toolkit.weights.layout import (
    DENSE,
    Kind,
    Layout,
    of_experts,
    on_device,
    while_loading,
)
from toolkit.worker.startup.cache_problem import (
    CacheCounts,
    cache_problem,
    count_parts,
    keeps_expanded,
    memory_problem,
)

RANK_BLOCK = 16  # ranks of adapters are padded to a multiple of this on a GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Memory of one device: sizes in bytes, lengths in tokens.

    With pipeline stages: of the stage with the least room for its cache."""

    device: Device
    parallel: ParallelConfig
    dtype: str  # of activations
    weight_type: str  # of most weights in memory
    num_parameters: int
    weights: int
    step: int  # of the largest step, CUDA graphs and the process itself
    bytes_per_position: float
    """Memory that each token of --max-model-len takes from the cache, for the rows' tables."""
    cache_settings: CacheConfig
    num_blocks: int  # pages, if layers are in several groups
    layout: MemoryLayout
    max_model_len: int
    max_positions: int
    has_cache: bool
    lack: str | None  # why cache, swap space and tables are too large, if they are
    expanded: int = 0  # bytes of weights of integers that are kept in 16 bits, too
    drafter: int = 0  # bytes of its weights, which `weights` contains
    tower: int = 0  # bytes of its weights, which `weights` contains
    pictures: int = 0  # bytes for encoded pictures
    is_approximate: bool = False  # the cache: what layers keep is found out when they are built
    states: tuple[int, int, int] = (0, 0, 0)  # of requests, snapshots, and bytes of each

    @property
    def weights_fit(self) -> bool:
        return self.weights + self._at_start <= self.device.free

    @property
    def _at_start(self) -> int:
        """Bytes that a start takes for all but weights and cache: on a GPU, it runs a step."""
        return self.step if self.device.kind == "cuda" else CPU_RUNTIME

    @property
    def block_size(self) -> int:
        return self.cache_settings.block_size

    @property
    def block_bytes(self) -> int:
        return self.layout.block_bytes

    @property
    def cache(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens in the KV cache, in sequences of full length that decode."""
        return self.layout.num_tokens(self.num_blocks, self.max_model_len)

    @property
    def sequence_bytes(self) -> tuple[int, int]:
        """Bytes of the cache that a sequence of full length takes: in decoding, and at most."""
        layout, length = self.layout, self.max_model_len
        pages = layout.pages_in_decode(length), layout.pages_of(length)
        return pages[0] * self.block_bytes, pages[1] * self.block_bytes

    @property
    def largest_context(self) -> int:
        """Largest --max-model-len that fits, up to the model's own maximum. 0 if none fits."""
        if not self.weights_fit:
            return 0
        if not self.has_cache:
            return self.max_positions
        # Nothing is expanded where few requests of full length fit.
        more = self.expanded // self.block_bytes if self.block_bytes else 0
        longest = self.layout.longest(self.num_blocks + more)
        if longest > self.max_model_len and self.bytes_per_position:
            room = self.cache + self.expanded + self.max_model_len * self.bytes_per_position
            longest = bisect_left(range(longest), True, key=lambda n: self._taken(n + 1) > room)
        return min(self.max_positions or longest, longest)

    def _taken(self, length: int) -> float:
        """Return the bytes that one sequence of a length takes, with the rows' tables for it."""
        cache = self.layout.pages_of(length) * self.block_bytes
        return cache + length * self.bytes_per_position

    @property
    def num_sequences(self) -> float:
        """Number of full-length sequences that fit in the KV cache."""
        return self.num_tokens / self.max_model_len if self.has_cache else 0.0

    @property
    def fits(self) -> bool:
        return self.largest_context >= self.max_model_len and self.lack is None

    @property
    def problem(self) -> str | None:
        """Explanation of what is too large, and what to do. None if the model fits."""
        if self.fits:
            return None
        if not self.weights_fit:
            half = " Half of that with --dtype bfloat16." if self.weight_type == "float32" else ""
            other = "a step" if self.device.kind == "cuda" else "the process"
            return (
                f"The weights take {size(self.weights)} in {self.weight_type} and {other} "
                f"{size(self._at_start)}; {size(self.device.free)} of {self.device.kind} memory "
                f"are free.{half}"
            )
        too_small = cache_problem(
            self.cache_settings,
            num_blocks=self.num_blocks,
            layout=self.layout,
            max_model_len=self.max_model_len,
            on_gpu=self.device.kind == "cuda",
        )
        return too_small or self.lack


def estimate(
    checkpoint: Checkpoint,
    engine: EngineConfig,
    device: Device,
    drafting: Drafting | None = None,
) -> Estimate:
    """Estimate the memory that a model needs, with its drafter.

    Raises CheckpointError for an unsupported model or one of unknown size, and ConfigError for
    settings that the model does not support."""
    described = checkpoint.description
    if engine.parallel.enable_expert_parallel and not (
        isinstance(described, Decoder) and described.has_experts
    ):
        raise ConfigError(
            f"--enable-expert-parallel: {checkpoint.name} has no experts that tk splits.",
            param="enable_expert_parallel",
        )
    if device.kind == "cpu":
        ranks = engine.parallel.num_local_devices
        device = dataclasses.replace(device, total=device.total // ranks, free=device.free // ranks)
    dtype = resolve_dtype(engine.model.dtype, checkpoint.config, on_gpu=device.kind != "cpu")
    on_gpu = device.kind == "cuda"
    stages = _stages(checkpoint, engine, dtype, device)
    cache_type = dtype if engine.cache.kv_cache_dtype == "auto" else engine.cache.kv_cache_dtype
    layout = partial(
        MemoryLayout.of,
        block_size=engine.cache.block_size,
        itemsize=TYPE_BYTES[cache_type],
        row_itemsize=TYPE_BYTES[dtype],
        state_type=engine.cache.state_type,
        most_drafts=engine.speculation.most_drafts,
        num_ranks=engine.parallel.tensor_parallel_size,
    )
    has_cache = bool(described.memory)
    drafts: Sequence[Memory] = drafting.memory if drafting is not None and has_cache else ()
    max_model_len = _max_model_len(checkpoint, engine)
    whole = layout(described.memory, drafter=drafts).with_groups(
        max_model_len,
        most_step(
            step_tokens(engine, on_gpu=on_gpu),
            engine.speculation.most_drafts,
            engine.parallel.pipeline_parallel_size,
        ),
    )
    max_model_len = _limit_to_blocks(max_model_len, engine, whole)
    steps = StepMemory(
        checkpoint.config,
        engine,
        TYPE_BYTES[dtype],
        on_gpu=on_gpu,
        max_model_len=max_model_len,
        num_layers=max(len(stage.memory) for stage in stages),
        num_groups=len(whole.groups),
        inputs=_inputs_of_layers(described),
        drafting=drafting,
    )
    tower = tower_memory(checkpoint, engine, TYPE_BYTES[dtype], max_model_len, on_gpu=on_gpu)
    step, table = steps.total, 0
    if isinstance(described, Decoder):
        if on_gpu:
            step += encoder_step(described.encoder, engine, TYPE_BYTES[dtype])
        sound = sound_memory(
            described.sound, engine, TYPE_BYTES[dtype], max_model_len, on_gpu=on_gpu
        )
        tower = tower or sound
    if tower is not None:
        stages[0] = stages[0].with_weights(tower.weights)
        step, table = step + tower.step, tower.table
    drafter_weights = drafts_spare = 0
    if drafting is not None and has_cache:
        plain = dataclasses.replace(engine, lora=LoRAConfig())
        nbytes = _tensor_bytes(drafting.packings, drafting.is_tied, plain, dtype, device)
        drafter_weights = sum(map(nbytes, drafting.parameters))
        # As `worker.startup.drafters` has them, for the positions of drafts.
        per_row = -(-drafting.most // engine.cache.block_size)
        blocks = (engine.scheduler.max_num_seqs + 1) * per_row
        spare_pages = -(-blocks // whole.groups[0].blocks_per_page)
        drafts_spare = spare_pages * whole.drafts.block_bytes
        stages = [stage.with_weights(drafter_weights) for stage in stages]

    def layout_of(stage: _Stage) -> MemoryLayout:
        return layout(stage.memory, drafter=drafts).with_groups_of(whole)

    def parts_of(stage: _Stage) -> CacheCounts:
        if not has_cache:
            return CacheCounts(0, 0, 0, 0, 0)
        own = layout_of(stage)
        return _count_parts(engine, device, stage, step, drafts_spare + table, own, max_model_len)

    def keeps(stage: _Stage) -> bool:
        # As `worker.startup.expansion` decides.
        return (
            has_cache
            and on_gpu
            and keeps_expanded(
                engine.cache,
                layout_of(stage),
                room=_room_on_gpu(engine, device, stage, step + drafts_spare + table),
                nbytes=stage.expanded,
                max_num_seqs=engine.scheduler.max_num_seqs,
                max_model_len=max_model_len,
                max_num_batched_tokens=step_tokens(engine, on_gpu=on_gpu),
            )
        )

    if not all(map(keeps, stages)):
        stages = [stage._replace(expanded=0) for stage in stages]

    # The tightest stage: one whose weights do not fit, else the one with the fewest blocks.
    least = step if on_gpu else CPU_RUNTIME
    tightest = min(
        stages,
        key=lambda stage: (
            stage.weights + least <= device.free,
            parts_of(stage).blocks,
            -stage.weights,
        ),
    )
    weights = tightest.weights
    counts = parts_of(tightest)
    num_blocks, num_host_blocks, num_requests, num_snapshots, num_host_slots = counts
    own = layout_of(tightest)
    block_bytes = own.block_bytes
    return Estimate(
        device=device,
        parallel=engine.parallel,
        dtype=dtype,
        weight_type=name_weights(
            described, checkpoint.packings, dtype, engine.model.quantization, on_gpu=on_gpu
        ),
        num_parameters=checkpoint.num_parameters or 0,
        weights=weights,
        step=step,
        bytes_per_position=steps.bytes_per_position if _is_measured(engine, device) else 0.0,
        cache_settings=engine.cache,
        num_blocks=num_blocks,
        layout=own,
        max_model_len=max_model_len,
        max_positions=checkpoint.longest,
        has_cache=has_cache,
        lack=_find_lack(
            engine,
            device,
            free=device.free - weights - least,
            cache=num_blocks * block_bytes
            + (num_requests + 1 + num_snapshots) * own.row_bytes
            + drafts_spare
            + table,
            swap=num_host_blocks * block_bytes + num_host_slots * own.row_bytes,
            tables=0 if on_gpu else steps.rows,
        ),
        expanded=tightest.expanded,
        drafter=drafter_weights,
        tower=0 if tower is None else tower.weights,
        pictures=table,
        is_approximate=isinstance(described, External) and has_cache,
        states=(num_requests, num_snapshots, own.row_bytes),
    )


def _inputs_of_layers(described: Decoder | Encoder | External) -> int:
    """Return the numbers of a token for layers, next to its embedding."""
    inputs = described.layer_inputs if isinstance(described, Decoder) else None
    return 0 if inputs is None else inputs.size * described.num_layers


class _Stage(NamedTuple):
    """A pipeline stage of one rank."""

    weights: int  # bytes without padding
    expanded: int  # bytes of those that a GPU may keep in 16 bits, too
    memory: Sequence[Memory]  # of its layers

    def with_weights(self, nbytes: int) -> "_Stage":
        return self._replace(weights=self.weights + nbytes)


def _stages(
    checkpoint: Checkpoint, engine: EngineConfig, dtype: str, device: Device
) -> list[_Stage]:
    """Return the pipeline stages."""
    count, described = engine.parallel.pipeline_parallel_size, checkpoint.description
    is_tied = bool(checkpoint.config.tie_word_embeddings)
    plain = dataclasses.replace(engine, lora=LoRAConfig())
    nbytes, base_nbytes = (
        _tensor_bytes(checkpoint.packings, is_tied, one, dtype, device) for one in (engine, plain)
    )
    expanded = _expanded_bytes(checkpoint.packings, engine, dtype, device)
    parameters = list(checkpoint.parameters)
    heads = [one for one in parameters if one.kind == ("embedding" if is_tied else "head")]
    if count == 1:
        # A tied head has no weight, but slots of its own.
        slots = sum(nbytes(head) - base_nbytes(head) for head in heads if is_tied)
        total = sum(map(nbytes, parameters)) + slots
        return [_Stage(total, sum(map(expanded, parameters)), described.memory)]
    if not isinstance(described, Decoder):
        kind = "models that run through Transformers" if described.memory else "encoders"
        raise ConfigError(
            f"--pipeline-parallel-size {count}: {kind} have one stage only.",
            param="pipeline_parallel_size",
        )
    layers = described.num_layers
    layer_bytes, first, last, each = dict.fromkeys(range(layers), 0), 0, 0, 0
    layer_expanded, each_expanded = dict.fromkeys(range(layers), 0), 0
    (head,) = heads
    inputs = described.layer_inputs
    of_inputs = [] if inputs is None else list(inputs.parameters(layers, described.hidden_size))
    for parameter in parameters:
        if parameter.layer is not None:
            layer_bytes[parameter.layer] += nbytes(parameter)
            layer_expanded[parameter.layer] += expanded(parameter)
        elif parameter in of_inputs or (of_inputs and parameter.kind == "embedding"):
            each += nbytes(parameter)
            each_expanded += expanded(parameter)
        elif parameter.kind in ("embedding", "positions"):
            first += nbytes(parameter)
        else:
            last += nbytes(parameter)
    if is_tied and not of_inputs:
        last += nbytes(head)
    last_layer = sum(base_nbytes(one) for one in parameters if one.layer == layers - 1)
    counts = split_layers(layers, count, last_layer, base_nbytes(head), described.num_sharing)
    begins = [sum(counts[:index]) for index in range(count)]
    stages = [range(begin, begin + n) for begin, n in zip(begins, counts, strict=True)]
    weights = [each + sum(layer_bytes[index] for index in stage) for stage in stages]
    weights[0] += first
    weights[-1] += last
    in_16_bits = [each_expanded + sum(layer_expanded[index] for index in stage) for stage in stages]
    memory = [memory_of(described.layers[index] for index in stage) for stage in stages]
    return list(map(_Stage, weights, in_16_bits, memory))


def _tensor_bytes(
    packings: Packings | None, is_tied: bool, engine: EngineConfig, dtype: str, device: Device
) -> Callable[[Parameter], int]:
    """Return a function for the bytes of one rank's part of a tensor."""
    quantization, num_ranks = engine.model.quantization, engine.parallel.tensor_parallel_size
    tables = ("head", "embedding") if is_tied else ("head",)
    is_grouped = device.kind == "cuda" and dtype != "float32"
    # Of adapters on a GPU, for each row and column. Ranks that share the model have less.
    slot_bytes, adapted = 0, ["linear"]
    if engine.lora.is_enabled and device.kind == "cuda":
        rank, ends = _slot_size(engine)
        slot_bytes = engine.lora.max_loras * -(-rank // RANK_BLOCK) * RANK_BLOCK * TYPE_BYTES[dtype]
        adapted += ["head", "embedding"] if ends else []

    layout = _layouts(packings, quantization, tables, dtype, device)

    def nbytes(parameter: Parameter) -> int:
        if parameter.kind not in ("linear", "expert", "head", "embedding", "table"):
            return parameter.size * TYPE_BYTES["float32" if parameter.is_float32 else dtype]
        rows, columns = parameter.size // parameter.columns, parameter.columns
        stored = layout(parameter).nbytes(rows, columns, TYPE_BYTES[dtype], on_gpu=is_grouped)
        slots = slot_bytes * (rows + columns) if parameter.kind in adapted else 0
        return -(-stored // num_ranks) + slots

    return nbytes


def _layouts(
    packings: Packings | None,
    quantization: str | None,
    tables: Sequence[str],
    dtype: str,
    device: Device,
) -> Callable[[Parameter], Layout]:
    """Return a function for the layout of a tensor. `tables`: kinds that are quantized on a CPU."""

    def layout(parameter: Parameter) -> Layout:
        name, columns = parameter.name.removesuffix(".weight"), parameter.columns
        packing = packings and packings.find(name)
        if packing:
            on_gpu, is_expert = device.kind == "cuda", parameter.kind == "expert"
            found = on_device(packing.layout, on_gpu=on_gpu, is_expert=is_expert)
            if on_gpu and is_expert:
                rows = (parameter.size // columns,)
                return of_experts({found}, rows, columns, in_float32=dtype == "float32")
            return found
        if quantization and parameter.kind in ("linear", "expert"):
            return while_loading(quantization, columns)
        if quantization in ("int4", "int8") and parameter.kind in tables and device.kind == "cpu":
            return while_loading("int8", columns)
        return DENSE

    return layout


def _expanded_bytes(
    packings: Packings | None, engine: EngineConfig, dtype: str, device: Device
) -> Callable[[Parameter], int]:
    """Return a function for the bytes of one rank's part of a tensor of integers in 16 bits."""
    layout = _layouts(packings, engine.model.quantization, (), dtype, device)

    def nbytes(parameter: Parameter) -> int:
        if device.kind != "cuda" or dtype == "float32" or parameter.kind != "linear":
            return 0
        found = layout(parameter)
        if found.kind is not Kind.INTEGERS or found.stored_group(parameter.columns) is None:
            return 0
        return -(-parameter.size * TYPE_BYTES[dtype] // engine.parallel.tensor_parallel_size)

    return nbytes


def _slot_size(engine: EngineConfig) -> tuple[int, bool]:
    """Return the highest rank of adapters, and whether one changes embeddings or the output head.

    Those that are not on this machine are left out."""
    found = {name: hub.local_adapter(path) for name, path in engine.lora.adapters.items()}
    folders = {name: folder for name, folder in found.items() if folder is not None}
    if not folders:
        return engine.lora.max_lora_rank or LEAST_MAX_RANK, bool(engine.lora.lora_embeddings)
    from toolkit.lora.peft import slot_size

    return slot_size(folders, engine.lora)


def _max_model_len(checkpoint: Checkpoint, engine: EngineConfig) -> int:
    wanted = engine.model.max_model_len
    if wanted is not None and 0 < checkpoint.longest < wanted:
        raise ConfigError(
            f"--max-model-len is {wanted}, but the model supports at most "
            f"{checkpoint.longest} tokens. Give that or less, or leave it out.",
            param="max_model_len",
        )
    length = wanted or checkpoint.context
    if length is None:
        raise CheckpointError(f"{checkpoint.name}: config.json has no maximum sequence length.")
    return length


def _limit_to_blocks(length: int, engine: EngineConfig, layout: MemoryLayout) -> int:
    """Return the longest sequence if the number of blocks is given, else `length`.

    As `worker.startup.cache_sizing` does."""
    blocks = engine.cache.num_gpu_blocks_override
    if blocks is None or engine.model.max_model_len is not None or not layout.layers:
        return length
    return min(length, layout.longest(blocks))


def _is_measured(engine: EngineConfig, device: Device) -> bool:
    """Return whether the cache gets what steps leave."""
    cache = engine.cache
    is_given = cache.num_gpu_blocks_override is not None or cache.kv_cache_memory is not None
    return device.kind == "cuda" and not is_given


def _count_parts(
    engine: EngineConfig,
    device: Device,
    stage: _Stage,
    step: int,
    spare: int,
    layout: MemoryLayout,
    max_model_len: int,
) -> CacheCounts:
    cache = engine.cache
    if device.kind == "cuda":
        room = _room_on_gpu(engine, device, stage, step + spare) - stage.expanded
    else:
        room = int(max(0, device.free - stage.weights - CPU_RUNTIME) * CPU_CACHE_SHARE) - spare
    return count_parts(
        cache,
        layout,
        room=room,
        max_num_seqs=engine.scheduler.max_num_seqs,
        max_model_len=max_model_len,
        on_gpu=device.kind == "cuda",
    )


def _room_on_gpu(engine: EngineConfig, device: Device, stage: _Stage, others: int) -> int:
    """Return the bytes for a cache and what is expanded. `others`: bytes next to weights."""
    usable = int(device.total * engine.cache.gpu_memory_utilization)
    return usable - (device.total - device.free) - stage.weights - others


def _find_lack(
    engine: EngineConfig, device: Device, *, free: int, cache: int, swap: int, tables: int
) -> str | None:
    """Return why these bytes do not fit, and what to change; None if they fit."""
    if device.kind == "cpu":
        return memory_problem(
            engine.cache, free=free, cache=cache, swap=swap, tables=tables, kind="cpu"
        )
    problem = None
    if not _is_measured(engine, device):
        problem = memory_problem(engine.cache, free=free, cache=cache, kind="cuda")
    if problem is None and engine.cache.swap_space:
        on_host = find_device("cpu").free // engine.parallel.num_local_devices
        problem = memory_problem(engine.cache, free=on_host, swap=swap, kind="cpu")
    return problem
