"""Devices of the ranks. They must be alike, since ranks compute the same steps together."""

import logging
from collections.abc import Mapping

import msgspec

from toolkit.errors import ConfigError
from toolkit.units import size

logger = logging.getLogger(__name__)

MIN_MEMORY_RATIO = 0.95  # memory ratio from which two devices count as equal: drivers reserve some


class DeviceReport(msgspec.Struct, frozen=True):
    """One rank's device."""

    name: str
    capability: str = ""  # CUDA compute capability
    multiprocessors: int = 0
    memory: int = 0  # bytes. Only of GPUs: ranks on CPUs may share memory

    @property
    def kind(self) -> tuple[str, int]:
        """Properties that must be equal. Names may differ: they include memory and form factor."""
        return self.capability or self.name, self.multiprocessors

    def __str__(self) -> str:
        if not self.capability:
            return self.name
        return (
            f"{self.name} (compute capability {self.capability}, "
            f"{self.multiprocessors} multiprocessors)"
        )


def report(wanted: str, rank: int) -> DeviceReport:
    """Return the report of this rank's device. Raises ConfigError if there is none."""
    import torch

    from toolkit.worker.startup.devices import choose_device

    device = choose_device(wanted, rank)
    if device.type == "cpu":
        return DeviceReport("CPU")
    found = torch.cuda.get_device_properties(device)
    capability = f"{found.major}.{found.minor}"
    return DeviceReport(found.name, capability, found.multi_processor_count, found.total_memory)


def require_alike(devices: Mapping[str, DeviceReport]) -> None:
    """Raise ConfigError if devices differ in kind; log a warning if only their memory does.

    `devices`: by name of the rank."""
    if len({device.kind for device in devices.values()}) > 1:
        raise ConfigError(
            f"The devices of one engine differ: "
            f"{_grouped({name: str(one) for name, one in devices.items()})}. Ranks share each step "
            "evenly, so their devices must be of one kind. CUDA_VISIBLE_DEVICES selects GPUs."
        )
    sizes = [device.memory for device in devices.values()]
    if min(sizes) < MIN_MEMORY_RATIO * max(sizes):
        each = _grouped({name: size(one.memory) for name, one in devices.items()})
        logger.warning(
            "GPUs of the ranks differ in memory; the smallest limits the KV cache: %s",
            each,
        )


def _grouped(told: Mapping[str, str]) -> str:
    """Return one phrase, with equal ranks grouped."""
    ranks: dict[str, list[str]] = {}
    for name, what in told.items():
        ranks.setdefault(what, []).append(name)
    return "; ".join(f"{', '.join(names)}: {what}" for what, names in ranks.items())
