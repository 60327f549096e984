"""Memory of layers on the device and, for preempted requests, on the host."""

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
    """The tensors of layers' memory of tokens, on the device and on the host.

    A copy between them takes a page of all layers at once. With one group, a page is a few blocks
    of all layers, and tensors of one shape lie together: [parts, pages, tokens, heads, size]. With
    several, pages of all groups are rows of one tensor of bytes, and layers are views of it."""

    def __init__(
        self,
        layout: MemoryLayout,
        *,
        num_pages: int,
        num_host_pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layout, self.device, self.dtype = layout, device, dtype
        self._place = 1 if len(layout.groups) == 1 else 0
        """Dimension of the tensors that counts pages."""
        self._tensors, self._host_tensors = (
            self._allocate(number, place)
            for number, place in ((num_pages, device), (num_host_pages, CPU))
        )

    def _allocate(self, num_pages: int, device: torch.device) -> list[torch.Tensor]:
        layout = self.layout
        if self._place == 0:
            return [lazy_zeros((num_pages, layout.page_bytes), torch.uint8, device)]
        # FP8 is stored as bytes: not every device copies it by index.
        stored = torch.uint8 if self.dtype == fp8.DTYPE else self.dtype
        tokens = layout.block_size * layout.groups[0].blocks_per_page
        counts = Counter(part for memory in layout.of_tokens for part in memory.parts)
        return [
            lazy_zeros((count, num_pages, tokens, part.num_heads, part.size), stored, device)
            for part, count in counts.items()
        ]

    def bind(self, model: Model, backends: Backends) -> None:
        """Give the layers their tensors."""
        keepers = [one for one in model.keepers() if isinstance(one.memory, TokenMemory)]
        for keeper, tensors in zip(keepers, self._of_layers(), strict=True):
            assert isinstance(keeper.memory, TokenMemory)
            keeper.bind(*tensors)
            keeper.group = self.layout.group_of(keeper.memory)
            keeper.backend = backends.of(keeper.memory.parts[0].size)

    def _of_layers(self) -> Iterator[list[torch.Tensor]]:
        """Yield each layer's tensors [blocks, block size, heads, size]."""
        layout, size = self.layout, self.layout.block_size
        if self._place == 1:
            parts = dict.fromkeys(part for one in layout.of_tokens for part in one.parts)
            tensors = {p: iter(one) for p, one in zip(parts, self._tensors, strict=True)}
            for memory in layout.of_tokens:
                yield [
                    next(tensors[p]).view(self.dtype).view(-1, size, p.num_heads, p.size)
                    for p in memory.parts
                ]
            return
        (pages,) = self._tensors
        elements = pages.view(self.dtype).view(-1)
        for memory, places in zip(layout.of_tokens, layout.places(), strict=True):
            per_page = layout.groups[layout.group_of(memory)].blocks_per_page
            block = layout.page_bytes // layout.itemsize // per_page
            yield [
                elements.as_strided(
                    (len(pages) * per_page, size, part.num_heads, part.size),
                    (block, part.count, part.size, 1),
                    place // layout.itemsize,
                )
                for part, place in zip(memory.parts, places, strict=True)
            ]

    def spoil(self, pages: Sequence[int]) -> None:
        """Fill pages with NaN, so that a read of what is not written yet shows."""
        which = torch.tensor(pages, device=self.device)
        for tensor in self._tensors:
            if self.dtype == fp8.DTYPE:
                tensor.index_fill_(self._place, which, FP8_NAN)
            else:
                tensor.view(self.dtype).index_fill_(self._place, which, math.nan)

    def copy_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (page, host page) pairs to the host, in stream order."""
        _copy(pairs, self._tensors, self._host_tensors, self._place)

    def copy_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (host page, page) pairs to the device."""
        _copy(pairs, self._host_tensors, self._tensors, self._place)


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
