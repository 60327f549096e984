"""Counters shared by the programs of a kernel. The last program of a call zeroes them."""

from __future__ import annotations

import torch
from torch import Tensor

_counters: dict[tuple[torch.device, int, int], Tensor] = {}


def counters(device: torch.device, count: int) -> Tensor:
    """Return counters, int32 `[count]`: the same for each call on a stream.

    Each stream has its own, since calls on two streams may overlap. So has a call captured on a
    stream without counters: its graph then starts by zeroing them."""
    on_gpu = device.type == "cuda"
    stream = torch.cuda.current_stream(device).cuda_stream if on_gpu else 0
    found = _counters.get((device, stream, count))
    if found is None:
        found = torch.zeros(count, dtype=torch.int32, device=device)
        if not (on_gpu and torch.cuda.is_current_stream_capturing()):
            _counters[device, stream, count] = found
    return found
