"""Memory of layers on the device and, for blocks of preempted requests, on the host."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from toolkit.attention import Backends
from toolkit.errors import ConfigError
from toolkit.hardware.memory import lazy_zeros
from toolkit.models.memory import MemoryLayout, RowMemory, StateType, TokenMemory
from toolkit.models.model import Model
from toolkit.weights.kinds import fp8

FP8_NAN = 0x7F  # the byte of e4m3's NaN
SWAP_PIECE = 2**26  # bytes per copy between device and host


class RowStates:
    """The tensors of layers' memory of rows: [num_slots, heads, size]."""

    def __init__(
        self,
        model: Model,
        state_type: StateType,
        *,
        num_slots: int,
        most_drafts: int,
        device: torch.device,
    ) -> None:
        """`state_type`: of parts that are `in_float32` by default. most_drafts: of a request."""
        self._tensors: list[torch.Tensor] = []
        state_dtype: torch.dtype = getattr(torch, state_type)
        for keeper in model.keepers():
            if isinstance(memory := keeper.memory, RowMemory):
                parts = [part.with_drafts(most_drafts) for part in memory.parts]
                types = (state_dtype if part.in_float32 else model.dtype for part in parts)
                own = [
                    lazy_zeros((num_slots, part.num_heads, part.size), dtype, device)
                    for part, dtype in zip(parts, types, strict=True)
                ]
                self._tensors += own
                keeper.bind(*own)

    def spoil(self, slots: Sequence[int]) -> None:
        """Fill slots with NaN, so that a read of an earlier request's state shows."""
        for tensor in self._tensors:
            tensor[list(slots)] = math.nan


class KVCache:
    """The tensors of layers' memory of tokens.

    Those of one shape lie together, [parts, num_blocks, block_size, heads, size]: a copy between
    device and host takes a block of all of them at once."""

    def __init__(
        self,
        layout: MemoryLayout,
        *,
        num_blocks: int,
        num_host_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layout, self.device, self.dtype = layout, device, dtype
        # FP8 is stored as bytes: not every device copies it by index.
        stored = torch.uint8 if dtype == fp8.DTYPE else dtype
        counts = Counter(part for memory in layout.of_tokens for part in memory.parts)
        self.blocks, self.host_blocks = (
            {
                part: lazy_zeros(
                    (count, number, layout.block_size, part.num_heads, part.size), stored, place
                )
                for part, count in counts.items()
            }
            for number, place in ((num_blocks, device), (num_host_blocks, torch.device("cpu")))
        )

    def bind(self, model: Model, backends: Backends) -> None:
        """Give the layers their tensors."""
        tensors = {part: iter(blocks) for part, blocks in self.blocks.items()}
        for keeper in model.keepers():
            if isinstance(memory := keeper.memory, TokenMemory):
                own = (next(tensors[part]).view(self.dtype) for part in memory.parts)
                keeper.bind(*own)
                keeper.backend = backends.of(memory.parts[0].size)

    def spoil(self, blocks: Sequence[int]) -> None:
        """Fill blocks with NaN, so that a read of what is not written yet shows."""
        nan = FP8_NAN if self.dtype == fp8.DTYPE else math.nan
        for parts in self.blocks.values():
            parts[:, torch.tensor(blocks, device=self.device)] = nan

    def copy_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (block, host block) pairs to the host, in stream order."""
        for source, target in self._pieces(pairs):
            source = source.to(self.device)
            for part, blocks in self.blocks.items():
                self.host_blocks[part][:, target] = blocks[:, source].cpu()

    def copy_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (host block, block) pairs to the device."""
        for source, target in self._pieces(pairs):
            target = target.to(self.device)
            for part, blocks in self.blocks.items():
                blocks[:, target] = self.host_blocks[part][:, source].to(self.device)

    def _pieces(
        self, pairs: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (sources, targets) int64, few at a time: gathering takes device memory."""
        if not pairs:
            return
        at_once = max(1, SWAP_PIECE // self.layout.block_bytes)
        for some in torch.split(torch.tensor(pairs, dtype=torch.int64), at_once):
            source, target = some.unbind(1)
            yield source, target


def choose_cache_dtype(wanted: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the cache's type for activations in `dtype`. Raises ConfigError for an unfit GPU."""
    if wanted == "auto":
        return dtype
    if device.type == "cuda" and not fp8.has_arithmetic(device):
        raise ConfigError(
            "--kv-cache-dtype fp8 needs a GPU of compute capability 8.9 (Ada, Hopper) or later.",
            param="kv_cache_dtype",
        )
    return fp8.DTYPE
