"""Counters that the programs of a kernel share: zero between two calls, as whoever comes last leaves them."""

from __future__ import annotations

import torch
from torch import Tensor

_counters: dict[tuple[torch.device, int, int], Tensor] = {}


def counters(device: torch.device, count: int) -> Tensor:
    """int32 `[count]`, the same for each call on a stream. Each stream has its own, as calls on two may overlap; and so has a call that
    is captured on a stream that had none, whose graph begins with zeros then.
    """
    on_gpu = device.type == "cuda"
    stream = torch.cuda.current_stream(device).cuda_stream if on_gpu else 0
    found = _counters.get((device, stream, count))
    if found is None:
        found = torch.zeros(count, dtype=torch.int32, device=device)
        if not (on_gpu and torch.cuda.is_current_stream_capturing()):
            _counters[device, stream, count] = found
    return found
