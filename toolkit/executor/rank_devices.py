"""What each rank computes on, and whether ranks can share a model: they compute the same steps at the same time."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from toolkit.errors import ConfigError

logger = logging.getLogger(__name__)

ALIKE = 0.95
"""The least share of another's memory that counts as the same: drivers keep some."""
GIB = 2**30


class DeviceReport(msgspec.Struct, frozen=True):
    """One rank's device."""

    name: str
    capability: str = ""
    """CUDA's compute capability."""
    multiprocessors: int = 0
    memory: int = 0
    """Bytes; of GPUs alone, as ranks on CPUs may share theirs."""

    @property
    def kind(self) -> tuple[str, int]:
        """What has to be the same. Names of one kind may differ, as they tell of memory and form, too."""
        return self.capability or self.name, self.multiprocessors

    def __str__(self) -> str:
        if not self.capability:
            return self.name
        return f"{self.name} (compute capability {self.capability}, {self.multiprocessors} multiprocessors)"


def report(wanted: str, rank: int) -> DeviceReport:
    """Of the device that is this rank's when `wanted` is asked for. Raises ConfigError when there is none."""
    import torch

    from toolkit.worker.worker import choose_device

    device = choose_device(wanted, rank)
    if device.type == "cpu":
        return DeviceReport("CPU")
    found = torch.cuda.get_device_properties(device)
    capability = f"{found.major}.{found.minor}"
    return DeviceReport(found.name, capability, found.multi_processor_count, found.total_memory)


def require_alike(devices: Mapping[str, DeviceReport]) -> None:
    """Raises ConfigError when devices are of different kinds; where only their memory differs, a line in the log tells. `devices`: by
    the name of their rank.
    """
    if len({device.kind for device in devices.values()}) > 1:
        raise ConfigError(
            f"The devices of one engine differ: {_each({name: str(one) for name, one in devices.items()})}. Its ranks share every step "
            "evenly, so that they have to be of one kind: CUDA_VISIBLE_DEVICES chooses among a machine's."
        )
    sizes = [device.memory for device in devices.values()]
    if min(sizes) < ALIKE * max(sizes):
        each = _each({name: f"{one.memory / GIB:.1f} GiB" for name, one in devices.items()})
        logger.warning(
            "the memory of the ranks' GPUs differs, and the KV cache is as the least has room for: %s",
            each,
        )


def _each(told: Mapping[str, str]) -> str:
    """Ranks that say the same together."""
    ranks: dict[str, list[str]] = {}
    for name, what in told.items():
        ranks.setdefault(what, []).append(name)
    return "; ".join(f"{', '.join(names)}: {what}" for what, names in ranks.items())
