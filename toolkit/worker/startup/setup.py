"""Facts that all steps of a worker's start-up share."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from toolkit.config import EngineConfig
from toolkit.distributed import Group, Stage
from toolkit.errors import ConfigError
from toolkit.hardware import memory
from toolkit.hardware.cores import num_cpus
from toolkit.kernels.table import Kernels, TritonKernels
from toolkit.models.build import choose_dtype, load_config
from toolkit.models.config.model_config import ArchitectureConfig
from toolkit.models.config.registry import describe, load_plugins
from toolkit.pooling import heads
from toolkit.weights.quantization import require
from toolkit.worker.step_sizes import TOKEN_BUDGETS


def use_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Use a worker's stream, if it has one: the default one cannot be captured.

    All work is on one stream. Kernels on a second one would slow each kernel of every graph by
    0.4 us on an H200: 8 % of a step of 128 requests."""
    return torch.cuda.stream(stream) if stream else nullcontext()


@dataclass(frozen=True, slots=True)
class Place:
    """The device of a worker, and its rank among those of a sharded model."""

    device: torch.device
    kernels: Kernels
    stream: torch.cuda.Stream | None
    world: Group  # all ranks of the model
    group: Group  # ranks of this one's stage
    stage: Stage
    num_local_ranks: int  # ranks on this machine, this one included. 0: all ranks of all engines

    @property
    def triton(self) -> TritonKernels | None:
        """Kernels that are compiled when they are first launched, and can be captured."""
        return self.kernels if isinstance(self.kernels, TritonKernels) else None


@dataclass(frozen=True, slots=True)
class Setup:
    """Options, the configuration of the model, and where it runs."""

    config: EngineConfig
    folder: Path
    place: Place
    model_config: ArchitectureConfig
    dtype: torch.dtype
    max_model_len: int

    @property
    def device(self) -> torch.device:
        return self.place.device

    @property
    def max_num_seqs(self) -> int:
        return self.config.scheduler.max_num_seqs

    @property
    def token_budget(self) -> int:
        """Most tokens of one step."""
        return self.config.scheduler.max_num_batched_tokens or TOKEN_BUDGETS[self.device.type]

    @property
    def num_compile_threads(self) -> int:
        """This rank's share of the cores."""
        here = self.place.num_local_ranks or self.config.parallel.num_devices
        return max(1, num_cpus() // here)

    def explain_lack_for_weights(self) -> AbstractContextManager[None]:
        """Turn out-of-memory errors into one about the weights."""
        advice = (
            "end other programs on the device, or see --quantization and --tensor-parallel-size"
        )
        return memory.explain_out_of_memory("the model's weights", self.device, advice)

    def explain_lack_for_steps(self) -> AbstractContextManager[None]:
        """Turn out-of-memory errors into one about the largest step."""
        what = f"the largest step, {self.token_budget} tokens of up to {self.max_num_seqs} requests"
        return memory.explain_out_of_memory(
            what, self.device, "lower --max-num-batched-tokens or --max-num-seqs"
        )


def read_setup(config: EngineConfig, folder: Path, place: Place) -> Setup:
    """Read the model's configuration and check what it decides. Raises ToolkitError."""
    load_plugins(strict=config.plugins.strict_plugins)
    model_config = load_config(folder, config.model)
    dtype = choose_dtype(config.model.dtype, model_config, place.device)
    max_model_len = _max_model_len(config.model.max_model_len, model_config, folder)
    require(config.model.quantization, place.device, dtype)
    return Setup(config, folder, place, model_config, dtype, max_model_len)


def _max_model_len(wanted: int | None, model_config: ArchitectureConfig, folder: Path) -> int:
    described = describe(model_config)
    made_for = described.max_positions
    if not made_for and wanted is None:
        raise ConfigError(
            "config.json does not say how long sequences may be. Give --max-model-len.",
            param="max_model_len",
        )
    if wanted is not None and 0 < described.longest < wanted:
        raise ConfigError(
            f"--max-model-len is {wanted}, but the model supports at most {described.longest} "
            "tokens. Give that or less, or leave it out.",
            param="max_model_len",
        )
    return wanted or min(made_for, heads.max_seq_length(folder) or made_for)
