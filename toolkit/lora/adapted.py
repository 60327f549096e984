"""Adapters of a model's projections, and the ones in use in a step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from toolkit.distributed import Shard
from toolkit.errors import CheckpointError
from toolkit.layers import Linear, OutputHead
from toolkit.lora.peft import Pair, read_adapter
from toolkit.weights.groups import Decoded
from toolkit.weights.slots import Slot
from toolkit.weights.source import Source
from toolkit.weights.weight import ALL, Epilogue, Weight

if TYPE_CHECKING:
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


class Active:
    """The adapters in use. All projections of a model share it."""

    def __init__(self) -> None:
        self._all = self._wanted = Groups(0, [])

    def set(self, slots: Slots, wanted: Slots) -> None:
        """Set the adapter of each token, and of each that the last layer's end computes."""
        self._all, self._wanted = Groups.of(slots), Groups.of(wanted)

    def groups(self, num_tokens: int) -> list[tuple[int, torch.Tensor]]:
        # If all tokens are wanted, both are the same.
        return (self._all if num_tokens == self._all.num_tokens else self._wanted).by_slot


class _Part(NamedTuple):
    rows: slice  # of the product
    pair: Pair


class AdaptedWeight(Weight):
    """A weight, and what each adapter adds to its products before activation and gate."""

    has_rows = False

    def __init__(self, base: Weight, active: Active) -> None:
        super().__init__(*base.shape)
        self.base, self._active = base, active
        self.parts: dict[int, list[_Part]] = {}  # by slot
        self._has_own_end = False

    @property
    def nbytes(self) -> int:
        return 0  # the base is counted

    def product(self, x: Rows, epilogue: Epilogue) -> torch.Tensor:
        assert isinstance(x, torch.Tensor), "see fuses_norm"
        groups = [one for one in self._active.groups(len(x)) if one[0] in self.parts]
        if not self._has_own_end:
            y = self.base.product(x, epilogue)
            self._add(y, x, groups)
            return y
        y = self.base.product(x, Epilogue())
        self._add(y, x, groups)
        if epilogue.bias is not None:
            y = y + epilogue.bias
        return epilogue.activate(y)

    def _add(
        self, y: torch.Tensor, x: torch.Tensor, groups: list[tuple[int, torch.Tensor]]
    ) -> None:
        for slot, tokens in groups:
            own = x[tokens].float()  # as in PEFT
            for part in self.parts[slot]:
                low, up = part.pair.low, part.pair.up
                y[tokens, part.rows] += ((own @ low.T) @ up.T).to(y.dtype)

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("no embedding has adapters")

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

    def finish(self, epilogue: Epilogue) -> Weight:
        # Adapters are added before the activation, which a packed weight would contain.
        self._has_own_end = epilogue.activation is not None or epilogue.gated
        self.base = self.base.finish(Epilogue() if self._has_own_end else epilogue)
        return self


class Adapters:
    """The adapters of a model on one rank, each in a slot of its own."""

    def __init__(self, model: nn.Module, complete: nn.Module) -> None:
        """Prepare all projections. Called before the weights are finished.

        complete: the model with all pipeline stages, without weights."""
        self._names = {one.name for linear in _linears(complete) for one in linear.sources}
        self.active = Active()
        self.slots: dict[str, int] = {"": BASE}
        linears = _linears(model)
        for linear in linears:
            linear.weight = AdaptedWeight(linear.weight, self.active)
        self._places: dict[str, list[tuple[Linear, int, int]]] = {}
        """Places of a projection by its name: (layer, number of its part, first row there)."""
        for linear in linears:
            first = 0
            for index, (source, part) in enumerate(zip(linear.sources, linear.parts, strict=True)):
                self._places.setdefault(source.name, []).append((linear, index, first))
                first += part.count

    def load(self, modules: Mapping[str, Path], max_rank: int) -> None:
        """Load adapters from folders, by their names. Raises CheckpointError."""
        for name, folder in modules.items():
            slot = len(self.slots)
            self._place(name, folder, read_adapter(name, folder, max_rank), slot)
            self.slots[name] = slot

    def _place(self, name: str, folder: Path, pairs: Mapping[str, Pair], slot: int) -> None:
        for module, pair in pairs.items():
            known = self._known(module)
            if known is None:
                raise CheckpointError(
                    f"adapter {name!r} ({folder}): it changes {module}, which is no linear layer "
                    f"of this model. It may be for another base model."
                )
            for linear, index, first in self._places.get(known, ()):  # others: another stage's
                rows = slice(first, first + linear.parts[index].count)
                own = _shard(pair, linear.sources[index], linear.parts[index], linear.columns)
                if own is None:
                    raise CheckpointError(
                        f"adapter {name!r} ({folder}): {module} adds [{len(pair.up)}, "
                        f"{pair.low.shape[1]}] to a weight of another shape. It is for another "
                        f"base model."
                    )
                weight = linear.weight
                assert isinstance(weight, AdaptedWeight)
                weight.parts.setdefault(slot, []).append(_Part(rows, own))

    def _known(self, module: str) -> str | None:
        """Return a projection's name in the checkpoint, which may lack the first parts."""
        parts = module.split(".")
        names = (".".join(parts[begin:]) for begin in range(len(parts)))
        return next((name for name in names if name in self._names), None)


def _linears(model: nn.Module) -> list[Linear]:
    """Return the layers that may have adapters."""
    modules = model.modules()
    return [one for one in modules if isinstance(one, Linear) and not isinstance(one, OutputHead)]


def _shard(pair: Pair, source: Source, rows: Shard, columns: Shard) -> Pair | None:
    """Return a rank's part of the factors. None: they have another shape."""
    order: Any = range(rows.begin, rows.begin + rows.count)
    total = rows.total
    if source.order is not None:
        order, total = source.order.rows[rows.begin : rows.begin + rows.count], source.order.total
    if pair.up.shape[0] != total or pair.low.shape[1] != columns.total:
        return None
    low = pair.low[:, columns.begin : columns.begin + columns.count]
    return Pair(low.contiguous(), pair.up[list(order)].contiguous())
