"""A worker's description of itself, from the parts that have been started."""

import logging

import torch

from toolkit.config import Speculation
from toolkit.models.memory import MemoryLayout
from toolkit.worker.info import WorkerInfo
from toolkit.worker.runner import Runner
from toolkit.worker.startup.cache_sizing import CacheSize
from toolkit.worker.startup.model_loader import LoadedModel
from toolkit.worker.startup.setup import Setup

logger = logging.getLogger(__name__)


def describe_worker(
    setup: Setup, loaded: LoadedModel, backend: str, size: CacheSize, layout: MemoryLayout
) -> WorkerInfo:
    """Return the description of a worker with a cache of this size."""
    device, config = setup.device, setup.config
    wanted = config.scheduler.async_scheduling
    return WorkerInfo(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        dtype=str(setup.dtype).removeprefix("torch."),
        weight_type=loaded.weight_type,
        attention_backend=backend,
        vocab_size=loaded.model.vocab_size,
        max_model_len=size.max_model_len,
        max_num_batched_tokens=setup.token_budget,
        num_blocks=size.num_blocks,
        num_host_blocks=size.num_host_blocks,
        block_size=config.cache.block_size,
        groups=layout.groups,
        cache_tokens=layout.num_tokens(size.num_blocks, size.max_model_len),
        num_parameters=loaded.num_parameters,
        model_parameters=loaded.model_parameters,
        weight_bytes=loaded.weight_bytes,
        cache_bytes=size.num_blocks * layout.block_bytes,
        num_state_slots=size.num_state_slots,
        num_host_slots=size.num_host_slots,
        world_size=setup.place.world.size,
        async_scheduling=device.type == "cuda" if wanted is None else wanted,
        attention_size=loaded.model.query_size,
    )


def describe_drafter(
    info: WorkerInfo, speculation: Speculation, runner: Runner, *, has_model: bool
) -> None:
    """Add what the scheduler needs to know about drafts."""
    info.most_drafts = speculation.num_speculative_tokens
    info.reads_predictions = not has_model
    info.most_step_drafts = runner.policy.most_step_drafts
    drafter = runner.drafter
    if drafter is not None and runner.policy.captures and not drafter.is_capturable:
        logger.warning("the drafter runs without CUDA graphs: its code may wait for the GPU")
