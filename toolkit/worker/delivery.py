"""Asynchronous copies to the host."""

from collections.abc import Callable

import torch


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host. It is complete after `copy_barrier`."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
        tensor, non_blocking=True
    )


def copy_barrier(device: torch.device) -> Callable[[], None]:
    """Return a function that waits for the copies started before."""
    if device.type == "cpu":
        return lambda: None
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    done.record()
    return done.synchronize
