"""The size of the KV cache: the memory that is left for it, and its numbers of blocks."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from toolkit.errors import OutOfMemoryError
from toolkit.hardware import memory
from toolkit.hardware.figures import CPU_CACHE_SHARE
from toolkit.models.memory import MemoryLayout
from toolkit.units import size
from toolkit.worker.info import WorkerInfo
from toolkit.worker.runner import Runner
from toolkit.worker.startup import memory_budget
from toolkit.worker.startup.cache_problem import count_parts, memory_problem, table_bytes
from toolkit.worker.startup.setup import Setup
from toolkit.worker.startup.warm_up import WarmUp, drop_graphs_that_wait

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Numbers of blocks and slots, and the longest sequence that they are for."""

    num_blocks: int
    num_host_blocks: int
    max_model_len: int
    num_state_slots: int = 0  # of requests and snapshots; 0: the model has no states
    num_host_slots: int = 0  # for states of preempted requests


def is_measured(setup: Setup) -> bool:
    """Return whether steps are run to find out how much memory they leave."""
    return setup.device.type == "cuda" and setup.config.cache.num_gpu_blocks_override is None


def measure_room(
    setup: Setup, runner: Runner, info: WorkerInfo, wait_for_weights: Callable[[], None]
) -> int:
    """Measure the bytes of a GPU that are left for the cache, next to steps and graphs.

    Kernels are compiled before the weights are loaded. Not called with --num-gpu-blocks-override,
    nor for encoders: then products keep PyTorch's choice of algorithm."""
    warm_up = WarmUp(runner, info, setup.max_num_seqs)
    if (kernels := setup.place.triton) is not None:
        warm_up.compile(kernels, setup.num_compile_threads)
    wait_for_weights()
    drop_graphs_that_wait(runner)
    if runner.backends.is_capturable and kernels is not None:
        warm_up.choose_products(kernels)
    peak = warm_up.peak_bytes(samples=setup.place.stage.is_last) - info.cache_bytes
    peak += warm_up.graph_bytes()
    total = torch.cuda.mem_get_info(setup.device)[1]
    return int(total * setup.config.cache.gpu_memory_utilization) - peak


def free_on_host(setup: Setup, weight_bytes: int) -> int:
    """Return this rank's share of the host's free memory, once the weights are loaded."""
    taken = setup.place.world.total(weight_bytes) if setup.device.type == "cpu" else 0
    sharing = setup.place.num_local_ranks or setup.config.parallel.world_size
    return setup.place.world.minimum(memory.available(torch.device("cpu"), taken) // sharing)


def choose_size(
    setup: Setup,
    free: int,
    layout: MemoryLayout,
    spare_bytes: int,
    room: int | None = None,
) -> CacheSize:
    """Return the size of a cache. Raises OutOfMemoryError.

    `free`: bytes of the host's memory, for swap space and, on a CPU, for all. `spare_bytes`: of a
    cache in addition to its blocks. `room`: bytes for the cache, if measured."""
    cache, max_model_len = setup.config.cache, setup.max_model_len
    block_bytes = layout.block_bytes
    on_gpu = setup.device.type == "cuda"
    room = int(free * CPU_CACHE_SHARE) - spare_bytes if room is None else room
    counts = count_parts(
        cache,
        layout,
        room=room,
        max_num_seqs=setup.max_num_seqs,
        max_model_len=max_model_len,
        on_gpu=on_gpu,
    )
    world = setup.place.world
    num_blocks, num_host_blocks, num_requests, num_snapshots, num_host_slots = map(
        world.minimum, counts
    )
    has_states = world.minimum(-bool(layout.row_bytes)) < 0  # on any stage
    num_state_slots = num_requests + num_snapshots if has_states else 0
    num_host_slots *= has_states
    is_typed = world.minimum(-layout.has_float32_rows) < 0
    if cache.mamba_ssm_cache_dtype != "auto" and not is_typed and world.rank == 0:
        logger.warning(
            "--mamba-ssm-cache-dtype %s changes nothing: no layer of this model keeps such a state",
            cache.mamba_ssm_cache_dtype,
        )
    if has_states and num_state_slots < setup.max_num_seqs and world.rank == 0:
        logger.warning(
            "at most %d requests run at once, not %d (--max-num-seqs): the state of each takes %s",
            num_state_slots,
            setup.max_num_seqs,
            size(layout.row_bytes),
        )
    if cache.swap_space and has_states and num_host_slots == 0 and world.rank == 0:
        logger.warning(
            "--swap-space %g has no room for the state of a request, which takes %s, next to "
            "blocks: preempted requests are computed again",
            cache.swap_space,
            size(layout.row_bytes),
        )
    overridden = (
        cache.num_gpu_blocks_override is not None and setup.config.model.max_model_len is None
    )
    if overridden and (longest := layout.longest(num_blocks)) < max_model_len:
        logger.warning("max_model_len is limited to %d by --num-gpu-blocks-override", longest)
        max_model_len = longest
    memory_budget.require_one_request_fits(cache, num_blocks, max_model_len, layout, setup.device)
    problem = memory_problem(
        cache,
        free=free,
        cache=0
        if on_gpu
        else num_blocks * block_bytes + (num_state_slots + 1) * layout.row_bytes + spare_bytes,
        swap=num_host_blocks * block_bytes + num_host_slots * layout.row_bytes,
        tables=0
        if on_gpu
        else table_bytes(
            setup.max_num_seqs + 1, max_model_len, cache.block_size, num_groups=len(layout.groups)
        ),
        kind="cpu",
    )
    if problem is not None:
        raise OutOfMemoryError(problem)
    return CacheSize(num_blocks, num_host_blocks, max_model_len, num_state_slots, num_host_slots)
