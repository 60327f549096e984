"""Memory of layers on the device and, for preempted requests, on the host."""

import math
from collections import Counter
from collections.abc import Sequence

import torch

from toolkit.attention import Backends
from toolkit.errors import ConfigError
from toolkit.hardware.memory import lazy_zeros
from toolkit.models.memory import MemoryLayout, RowMemory, StateType, TokenMemory
from toolkit.models.model import Model
from toolkit.weights.kinds import fp8

FP8_NAN = 0x7F  # the byte of e4m3's NaN
SWAP_PIECE = 2**26  # bytes per copy between device and host
CPU = torch.device("cpu")


class RowStates:
    """The tensors of layers' memory of rows: [num_slots, heads, size].

    The host has slots of the same shapes, [num_host_slots, heads, size]. A copy takes a slot of all
    tensors."""

    def __init__(
        self,
        model: Model,
        state_type: StateType,
        *,
        num_slots: int,
        num_host_slots: int,
        most_drafts: int,
        tokens: torch.Tensor | None,
        device: torch.device,
    ) -> None:
        """`state_type`: of parts that are `in_float32` by default. most_drafts: of a request.

        tokens: [num_slots], number of tokens in each state, if drafts make it differ."""
        self._tensors: list[torch.Tensor] = [] if tokens is None else [tokens]
        self._host_tensors = [torch.zeros(num_host_slots, dtype=one.dtype) for one in self._tensors]
        state_dtype: torch.dtype = getattr(torch, state_type)
        for keeper in model.keepers():
            if isinstance(memory := keeper.memory, RowMemory):
                parts = [part.with_drafts(most_drafts) for part in memory.parts]
                types = [state_dtype if part.in_float32 else model.dtype for part in parts]
                own, on_host = (
                    [
                        lazy_zeros((number, part.num_heads, part.size), dtype, place)
                        for part, dtype in zip(parts, types, strict=True)
                    ]
                    for number, place in ((num_slots, device), (num_host_slots, CPU))
                )
                self._tensors += own
                self._host_tensors += on_host
                keeper.bind(*own)

    def spoil(self, slots: Sequence[int]) -> None:
        """Fill slots with NaN, so that a read of an earlier request's state shows."""
        for tensor in self._tensors:
            if tensor.is_floating_point():
                tensor[list(slots)] = math.nan

    def copy_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (slot, host slot) pairs to the host, in stream order."""
        _copy(pairs, self._tensors, self._host_tensors, dim=0)

    def copy_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (host slot, slot) pairs to the device."""
        _copy(pairs, self._host_tensors, self._tensors, dim=0)


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
            for number, place in ((num_blocks, device), (num_host_blocks, CPU))
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
        _copy(pairs, [*self.blocks.values()], [*self.host_blocks.values()], dim=1)

    def copy_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (host block, block) pairs to the device."""
        _copy(pairs, [*self.host_blocks.values()], [*self.blocks.values()], dim=1)


def _copy(
    pairs: Sequence[tuple[int, int]],
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    dim: int,
) -> None:
    """Copy (source, target) places, which `dim` of each tensor counts, between device and host.

    A few at a time: gathering takes device memory."""
    if not (pairs and sources):
        return
    place_bytes = sum(one.nbytes // one.shape[dim] for one in sources)
    for some in torch.split(torch.tensor(pairs), max(1, SWAP_PIECE // place_bytes)):
        read, written = some.unbind(1)
        read, written = read.to(sources[0].device), written.to(targets[0].device)
        for source, target in zip(sources, targets, strict=True):
            target.index_copy_(dim, written, source.index_select(dim, read).to(target.device))


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
