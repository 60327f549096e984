"""A product whose parts have different layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from toolkit.distributed import Shard
from toolkit.weights.groups import Decoded
from toolkit.weights.slots import Slot
from toolkit.weights.weight import ALL, Epilogue, Weight

if TYPE_CHECKING:
    from toolkit.weights.weight import Rows


class PartedWeight(Weight):
    """Weights whose products are concatenated, as q, k and v in different formats."""

    has_rows = False

    def __init__(self, weights: Sequence[Weight]) -> None:
        super().__init__(sum(one.shape[0] for one in weights), weights[0].shape[1])
        self.weights = nn.ModuleList(weights)
        self._sizes = [one.shape[0] for one in weights]

    @property
    def nbytes(self) -> int:
        return 0  # the parts are counted

    def product(self, x: Rows, epilogue: Epilogue) -> torch.Tensor:
        assert isinstance(x, torch.Tensor), "see fuses_norm"
        y = torch.cat([one.product(x, Epilogue()) for one in self._parts], dim=1)
        if epilogue.bias is not None:
            y = y + epilogue.bias
        return epilogue.activate(y)

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("no embedding has parts")

    def part_slots(
        self,
        rows: slice,
        shards: tuple[Shard, Shard],
        *,
        transpose: bool = False,
        order: tuple[int, ...] | None = None,
    ) -> dict[str, Slot]:
        ((weight, own),) = self._overlaps(rows)
        return weight.part_slots(own, shards, transpose=transpose, order=order)

    def write(self, rows: slice, decoded: Decoded) -> None:
        ((weight, own),) = self._overlaps(rows)
        weight.write(own, decoded)

    def fill_randomly(self, generator: torch.Generator) -> None:
        """The parts are filled."""

    def dequantize(self, rows: slice = ALL) -> torch.Tensor:
        return torch.cat([weight.dequantize(own) for weight, own in self._overlaps(rows)])

    def multiply(self, factor: float, rows: slice = ALL) -> None:
        for weight, own in self._overlaps(rows):
            weight.multiply(factor, own)

    def finish(self, epilogue: Epilogue) -> Weight:
        self.weights = nn.ModuleList([one.finish(Epilogue()) for one in self._parts])
        return self

    @property
    def _parts(self) -> list[Weight]:
        return list(self.weights)  # type: ignore[arg-type]  # a ModuleList

    def _overlaps(self, rows: slice) -> Iterator[tuple[Weight, slice]]:
        """Yield the parts that have some of these rows, with their own rows."""
        begin, end, _ = rows.indices(self.shape[0])
        first = 0
        for weight, size in zip(self._parts, self._sizes, strict=True):
            own = slice(max(begin, first) - first, min(end, first + size) - first)
            if own.start < own.stop:
                yield weight, own
            first += size
