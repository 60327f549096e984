"""A projection's weight with adapters on a GPU, and the adapters in use in a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch

from toolkit.distributed import Shard
from toolkit.kernels import reference
from toolkit.kernels.table import TritonKernels
from toolkit.lora.peft import Pair
from toolkit.lora.weight import BASE, Adapted, Part, Slots, StepActive, StepAdapters
from toolkit.weights.weight import ALL, Epilogue, Weight, parameter

if TYPE_CHECKING:
    from toolkit.kernels.triton.products.lora import Factors
    from toolkit.kernels.triton.products.matmul import Unscaled
    from toolkit.weights.weight import Rows


class GPUActive(StepActive):
    """The adapters of a step on a GPU."""

    def __init__(self, num_slots: int, rank_block: int) -> None:
        super().__init__(num_slots)
        self._rank_block = rank_block
        self._blocks = np.ones(num_slots + 1, np.int32)  # of ranks, by slot
        self._step: StepAdapters | None = None
        self._keeps_all = True

    def place(self, slot: int, rank: int) -> None:
        self._blocks[slot] = max(1, -(-rank // self._rank_block))

    def pack(self, slots: Slots, index: Slots, used: Slots) -> None:
        index[:] = -1
        used[:] = 0
        found = list(dict.fromkeys(slots[slots != BASE].tolist()))
        if found:
            places = np.full(self.num_slots + 1, -1, np.int32)
            places[found] = np.arange(len(found))
            index[: len(slots)] = places[slots]
            used[0], used[1] = len(found), self._blocks[found].max()
            used[2 : 2 + len(found)] = found
            used[2 : 2 + len(found)] -= 1  # kernels count slots from 0

    def of_rows(self, slot: int, num_rows: int, device: torch.device) -> StepAdapters | None:
        if slot == BASE:
            return None
        # One copy and no kernel: kernels read this early. Both begin at 16 bytes, as in a step.
        padded = -(-num_rows // 4) * 4
        packed = torch.zeros(padded + 3, dtype=torch.int32, device="cpu")
        packed[padded:] = torch.tensor([1, self._blocks[slot], slot - 1], device="cpu")
        packed = packed.to(device)
        places = packed[:num_rows]
        return StepAdapters(packed[padded:], places, places)

    @contextmanager
    def during(self, step: StepAdapters | None, *, keeps_all: bool = True) -> Iterator[None]:
        self._step, self._keeps_all = step, keeps_all
        try:
            yield
        finally:
            self._step = None

    def keep_wanted(self) -> None:
        self._keeps_all = False

    @property
    def rows(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return (`used`, place of each row's adapter in it). None: a step without adapters."""
        if self._step is None:
            return None
        used, tokens, requests = self._step
        return used, tokens if self._keeps_all else requests


class GPUAdaptedWeight(Adapted):
    """A weight, and a buffer for each slot's adapter, at a fixed address for CUDA graphs."""

    def __init__(
        self,
        base: Weight,
        active: GPUActive,
        parts: Sequence[int],
        max_rank: int,
        dtype: torch.dtype,
        kernels: TritonKernels,
        columns: int | None = None,
    ) -> None:
        """parts: rows of each projection, whose adapters have ranks of their own; columns: those of
        A, if they are not the weight's."""
        super().__init__(base)
        self._active, self._kernels = active, kernels
        rows, columns = sum(parts), base.shape[1] if columns is None else columns
        self._columns = columns
        block = kernels.rank_block
        self._rank, self._block = -(-max_rank // block) * block, block
        device, num_slots = next(base.parameters()).device, active.num_slots
        low, up = (num_slots, len(parts) * self._rank, columns), (num_slots, rows, self._rank)
        self._low = parameter(torch.zeros(low, dtype=dtype, device=device))
        self._up = parameter(torch.zeros(up, dtype=dtype, device=device))
        self._blocks = parameter(torch.zeros(num_slots, dtype=torch.int32, device=device))
        index = torch.arange(len(parts), dtype=torch.int32)
        self._parts = parameter(index.repeat_interleave(torch.tensor(parts)).to(device))
        bounds = [0, *accumulate(parts)]
        self._bounds = parameter(torch.tensor(bounds, dtype=torch.int32, device=device))
        self._places = {row: place for place, row in enumerate(bounds[:-1])}
        """By first row, the place of a projection among those of the weight."""

    @property
    def nbytes(self) -> int:
        return sum(
            one.nbytes for one in (self._low, self._up, self._blocks, self._parts, self._bounds)
        )

    def pack_parts(self, parts: list[Part]) -> list[Part]:
        """Return one part of all rows, in memory that the GPU reads by itself."""
        rank = max(-(-len(one.pair.low) // self._block) * self._block for one in parts)
        of_part, rows, columns = len(self._places), self._up.shape[1], self._columns
        low, up = (
            torch.zeros(size, dtype=self._up.dtype, device="cpu", pin_memory=self._up.is_cuda)
            for size in ((of_part * rank, columns), (rows, rank))
        )
        for one in parts:
            own = len(one.pair.low)
            first = self._places[one.rows.start] * rank
            low[first : first + own] = one.pair.low
            up[one.rows, :own] = self._scaled(one)
        return [Part(ALL, Pair(low, up))]

    def place(self, slot: int, packed: list[Part]) -> None:
        """Replace the adapter of a slot on the current stream, in few copies."""
        at = slot - 1  # slot 0 is the base model
        if not packed:
            self._blocks[at].fill_(0)
            return
        low, up = packed[0].pair.low, packed[0].pair.up
        rank = up.shape[1]
        self._blocks[at].fill_(rank // self._block)
        if rank < self._rank:
            self._low[at].zero_()
            self._up[at].zero_()
        num_parts, columns = len(self._places), self._columns
        low = low.view(num_parts, rank, columns)
        self._low[at].view(num_parts, self._rank, columns)[:, :rank].copy_(low, non_blocking=True)
        self._up[at, :, :rank].copy_(up, non_blocking=True)

    def product(self, x: Rows, epilogue: Epilogue) -> torch.Tensor:
        factors = self._factors()
        if self.base.adds_deltas:
            return self.base.product(x, epilogue._replace(factors=factors))
        assert isinstance(x, torch.Tensor), "see fuses_norm"
        y = self.base.product(x, Epilogue())
        if epilogue.bias is not None:
            y = y + epilogue.bias
        if factors is None:
            return epilogue.activate(y)
        activation, gated = epilogue.activation, epilogue.gated
        return self._kernels.add_delta(y, x, factors, activation, gated=gated)

    def reads_rounded(self, num_tokens: int) -> bool:
        # Adapters multiply rows in 16 bits. All products of a step see adapters, or none does.
        return self._active.rows is None and self.base.reads_rounded(num_tokens)

    def rounded_product(self, x: Rows, epilogue: Epilogue) -> Rows:
        if not self.base.adds_deltas:
            return self.product(x, epilogue)
        return self.base.rounded_product(x, epilogue._replace(factors=self._factors()))

    def fuses_norm(self, num_tokens: int) -> bool:
        return self.base.fuses_norm(num_tokens)

    def add_norm(
        self,
        x: torch.Tensor,
        epilogue: Epilogue,
        residual: torch.Tensor,
        norm: reference.Norm,
        square_sums: torch.Tensor,
    ) -> Unscaled:
        epilogue = epilogue._replace(factors=self._factors())
        return self.base.add_norm(x, epilogue, residual, norm, square_sums)

    def finish(self, epilogue: Epilogue) -> Weight:
        self.base = self.base.finish(epilogue if self.base.adds_deltas else Epilogue())
        return self

    def _factors(self) -> Factors | None:
        rows = self._active.rows
        if rows is None:
            return None
        used, index = rows
        buffers = self._low, self._up, self._blocks, self._parts, self._bounds
        return self._kernels.factors(*buffers, index, used)


class GPUAdaptedTable(GPUAdaptedWeight):
    """A table of embeddings, and what each adapter adds to its rows. See `Pair`."""

    def product(self, x: Rows, epilogue: Epilogue) -> torch.Tensor:
        raise NotImplementedError("a table has no products")

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        return self._add_rows(self.base.take(ids), ids, 0)

    def take_shard(self, ids: torch.Tensor, shard: Shard) -> torch.Tensor:
        return self._add_rows(self.base.take_shard(ids, shard), ids, shard.begin)

    def rebased(self, weight: Weight) -> Weight:
        self.base = weight
        return self

    def _add_rows(self, y: torch.Tensor, ids: torch.Tensor, begin: int) -> torch.Tensor:
        factors = self._factors()
        return y if factors is None else self._kernels.add_rows(y, ids, begin, factors)
