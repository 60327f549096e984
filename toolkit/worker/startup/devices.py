"""The device of a worker, and its CPU threads."""

import logging

import torch

from toolkit.config import EngineConfig
from toolkit.errors import ConfigError
from toolkit.hardware.cores import find_cores, plan_threads, requested_threads
from toolkit.kernels import cpu

logger = logging.getLogger(__name__)


def choose_device(wanted: str, rank: int | None) -> torch.device:
    """Return the worker's device. `rank`: set if each rank has its own GPU. Raises ConfigError."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda: PyTorch sees no NVIDIA GPU here. nvidia-smi shows if the driver does.",
            param="device",
        )
    if rank is not None:
        # Ranks of one machine have consecutive numbers.
        torch.cuda.set_device(rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def start_threads(config: EngineConfig, rank: int) -> None:
    """Start CPU threads as `plan_threads` decides."""
    ranks, given = config.parallel.num_devices, requested_threads()
    asked = config.device.num_threads or (max(1, given // ranks) if given else None)
    plan = plan_threads(find_cores(), asked, rank, ranks)
    torch.set_num_threads(plan.count)
    cpu.set_num_threads(plan.count)
    # Engines do not know each other's cores.
    alone = config.parallel.data_parallel_size == 1
    if len(plan.cores) > 1 and alone:
        bound = cpu.bind_threads([core.cpus for core in plan.cores])
        how = "all but the first pinned to cores" if bound else "not pinned: the system refused"
        logger.info("%d threads, %s", plan.count, how)
