"""A projection's weight with adapters, and the adapters in use in a step."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from toolkit.distributed import Shard, full_shard
from toolkit.kernels.cpu.adapters import Part as KernelPart
from toolkit.kernels.cpu.adapters import StepSlots
from toolkit.lora.peft import Pair
from toolkit.weights.groups import Decoded
from toolkit.weights.kinds.packed import PackedWeight
from toolkit.weights.slots import Slot
from toolkit.weights.weight import ALL, Epilogue, Weight

if TYPE_CHECKING:
    from toolkit.kernels.cpu.adapters import AdaptedProduct
    from toolkit.weights.weight import Rows

Slots = npt.NDArray[np.int32]  # of adapters; 0: none
BASE = 0


class Groups(NamedTuple):
    """The tokens of a step that use each adapter: (slot, int64 indices)."""

    num_tokens: int
    by_slot: list[tuple[int, torch.Tensor]]

    @classmethod
    def of(cls, slots: Slots) -> Groups:
        used = np.unique(slots[slots != BASE])
        return cls(
            len(slots),
            [(int(slot), torch.from_numpy(np.flatnonzero(slots == slot))) for slot in used],
        )


NO_GROUPS = Groups(0, [])


class StepAdapters(NamedTuple):
    """The adapters of a step, on the device. All int32."""

    used: torch.Tensor
    """[2 + n]: how many adapters are in use, the most blocks of ranks of one, their slots."""
    tokens: torch.Tensor  # [num_tokens], place of each token's adapter in `used`; -1: none
    requests: torch.Tensor  # [num_reqs], the same of each request


class StepActive(abc.ABC):
    """The adapters of the step that is launched or captured. All projections of a model share it.

    Kernels are launched in the model's order, so what is set here holds for those that follow."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots

    @abc.abstractmethod
    def place(self, slot: int, rank: int) -> None:
        """Take in an adapter's highest rank, before the weights get their parts of it."""

    @abc.abstractmethod
    def pack(self, slots: Slots, index: Slots, used: Slots) -> None:
        """Fill `index` [num_reqs] and `used` [2 + num_slots] of `StepAdapters`."""

    @abc.abstractmethod
    def of_rows(self, slot: int, num_rows: int, device: torch.device) -> StepAdapters | None:
        """Return the adapters of a step whose rows are all of one request. None: it has none."""

    @abc.abstractmethod
    def during(
        self, step: StepAdapters | None, *, keeps_all: bool = True
    ) -> AbstractContextManager[None]:
        """Launch a step inside, with these adapters or without any.

        keeps_all: it computes all tokens, not only those that it wants."""

    @abc.abstractmethod
    def keep_wanted(self) -> None:
        """From here on, the step computes only each request's wanted token."""


class Active(StepActive):
    """The adapters of a step on a CPU. Slots are their own places in `StepAdapters`."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self.step = StepSlots()
        self._all = self._wanted = NO_GROUPS

    def place(self, slot: int, rank: int) -> None:
        """Do nothing: each weight has its parts of the adapter in this slot."""

    def pack(self, slots: Slots, index: Slots, used: Slots) -> None:
        index[: len(slots)] = slots - 1
        index[len(slots) :] = -1
        used[:] = 0

    def of_rows(self, slot: int, num_rows: int, device: torch.device) -> StepAdapters | None:
        places = torch.full((num_rows,), slot - 1, dtype=torch.int32, device=device)
        return None if slot == BASE else StepAdapters(places, places, places)

    @contextmanager
    def during(self, step: StepAdapters | None, *, keeps_all: bool = True) -> Iterator[None]:
        if step is not None:
            wanted = step.requests.numpy() + 1
            slots = step.tokens.numpy() + 1 if keeps_all else wanted
            self._all, self._wanted = Groups.of(slots), Groups.of(wanted)
            self.step.set(slots, wanted)
        try:
            yield
        finally:
            self._all = self._wanted = NO_GROUPS

    def keep_wanted(self) -> None:
        """Do nothing: a product has one or the other number of rows."""

    def groups(self, num_tokens: int) -> list[tuple[int, torch.Tensor]]:
        # If all tokens are wanted, both are the same.
        return (self._all if num_tokens == self._all.num_tokens else self._wanted).by_slot


class Part(NamedTuple):
    rows: slice  # of the product
    pair: Pair


class Adapted(Weight):
    """A weight, and what each adapter adds to its products before activation and gate."""

    def __init__(self, base: Weight) -> None:
        super().__init__(*base.shape)
        self.base = base
        self.row_factors: torch.Tensor | None = None
        """Factors of the weight's rows, which those of each B have too. None: all are 1."""

    @abc.abstractmethod
    def pack_parts(self, parts: list[Part]) -> list[Part]:
        """Return an adapter's parts as `place` takes them. From any thread."""

    @abc.abstractmethod
    def place(self, slot: int, packed: list[Part]) -> None:
        """Replace the adapter of a slot. Nothing: it does not change this weight."""

    def _scaled(self, part: Part) -> torch.Tensor:
        """Return the second factor of a part in fp32, with all that multiplies it."""
        up = part.pair.up.float() * part.pair.scale
        return up if self.row_factors is None else up.mul_(self.row_factors[part.rows, None])

    @property
    def has_rows(self) -> bool:  # type: ignore[override]  # of the base
        return self.base.has_rows

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows without what adapters add: those of an embedding are in `AdaptedTable`."""
        return self.base.take(ids)

    def part_slots(
        self,
        rows: slice,
        shards: tuple[Shard, Shard],
        *,
        transpose: bool = False,
        order: tuple[int, ...] | None = None,
    ) -> dict[str, Slot]:
        return self.base.part_slots(rows, shards, transpose=transpose, order=order)

    def write(self, rows: slice, decoded: Decoded) -> None:
        self.base.write(rows, decoded)

    def fill_randomly(self, generator: torch.Generator) -> None:
        """The base is filled."""

    def dequantize(self, rows: slice = ALL) -> torch.Tensor:
        return self.base.dequantize(rows)

    def multiply(self, factor: float, rows: slice = ALL) -> None:
        self.base.multiply(factor, rows)
        if self.row_factors is None:
            self.row_factors = torch.ones(self.shape[0], device="cpu")
        self.row_factors[rows] *= factor


class AdaptedWeight(Adapted):
    """A weight on a CPU. PyTorch multiplies its adapters, unless the weight is packed for a CPU."""

    def __init__(self, base: Weight, active: Active, max_ranks: int) -> None:
        """max_ranks: of all parts of an adapter."""
        super().__init__(base)
        self._active, self._max_ranks = active, max_ranks
        self.parts: dict[int, list[Part]] = {}  # by slot
        self._adapted: AdaptedProduct | None = None  # of a packed weight

    @property
    def nbytes(self) -> int:
        return 0  # the base is counted

    def pack_parts(self, parts: list[Part]) -> list[Part]:
        # B is stored transposed, as the kernel reads it.
        return [
            Part(one.rows, Pair(_in_fp32(one.pair.low), self._scaled(one).T.contiguous().T))
            for one in parts
        ]

    def place(self, slot: int, packed: list[Part]) -> None:
        if self._adapted is not None:
            self._adapted.place(
                slot, [KernelPart(rows.start or 0, pair.low, pair.up.T) for rows, pair in packed]
            )
        if packed:
            self.parts[slot] = packed
        else:
            self.parts.pop(slot, None)

    def product(self, x: Rows, epilogue: Epilogue) -> torch.Tensor:
        assert isinstance(x, torch.Tensor), "see fuses_norm"
        groups = self._active.groups(len(x))
        if self._adapted is not None and groups:
            # Also if they change other weights only: any adapters may run when this is replayed.
            assert isinstance(self.base, PackedWeight)
            return self.base.adapted_product(self._adapted, x)
        groups = [one for one in groups if one[0] in self.parts]
        if not groups:
            return self.base.product(x, epilogue)
        if epilogue.activation is None and not epilogue.gated:
            y = self.base.product(x, epilogue)
            self._add(y, x, groups)
            return y
        y = self.base.product(x, Epilogue(epilogue.bias))
        self._add(y, x, groups)
        return epilogue.activate(y)

    def _add(
        self, y: torch.Tensor, x: torch.Tensor, groups: list[tuple[int, torch.Tensor]]
    ) -> None:
        for slot, tokens in groups:
            own = x[tokens].float()  # as in PEFT
            for part in self.parts[slot]:
                low, up = part.pair.low, part.pair.up
                y[tokens, part.rows] += ((own @ low.T) @ up.T).to(y.dtype)

    def finish(self, epilogue: Epilogue) -> Weight:
        self.base = self.base.finish(epilogue)
        if isinstance(self.base, PackedWeight):
            active = self._active
            self._adapted = self.base.adapted(active.step, active.num_slots, self._max_ranks)
        return self


def _in_fp32(factors: torch.Tensor) -> torch.Tensor:
    """Return a copy: factors share the memory of a complete file."""
    return factors.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


class AdaptedTable(AdaptedWeight):
    """A table of embeddings, and what each adapter adds to its rows."""

    def product(self, x: Rows, epilogue: Epilogue) -> torch.Tensor:
        raise NotImplementedError("a table has no products")

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        return self._add_rows(self.base.take(ids), ids, full_shard(self.shape[0]))

    def take_shard(self, ids: torch.Tensor, shard: Shard) -> torch.Tensor:
        return self._add_rows(self.base.take_shard(ids, shard), ids, shard)

    def rebased(self, weight: Weight) -> Weight:
        self.base = weight
        return self

    def _add_rows(self, y: torch.Tensor, ids: torch.Tensor, shard: Shard) -> torch.Tensor:
        for slot, tokens in self._active.groups(len(ids)):
            own = ids[tokens] - shard.begin
            is_own = (own >= 0) & (own < shard.count)
            tokens, own = tokens[is_own], own[is_own]
            for part in self.parts.get(slot, ()):
                y[tokens] += (part.pair.low.T[own] @ part.pair.up.T).to(y.dtype)
        return y
