"""Weights in MXFP4 (`kernels.mxfp4`), for experts on a GPU."""

from __future__ import annotations

import torch

from toolkit.distributed import Shard
from toolkit.errors import CheckpointError, ConfigError
from toolkit.kernels import mxfp4
from toolkit.kernels.reference import Stack
from toolkit.weights.formats.mxfp4 import Microscaled
from toolkit.weights.formats.packing import Packing, divided
from toolkit.weights.groups import Decoded, Groups, pack_nibbles
from toolkit.weights.slots import Slot
from toolkit.weights.weight import StackableWeight, parameter

_DUMMY_SCALES = 119, 121
"""Exponents for dummy weights: about the deviation of DUMMY_STD."""


class MXFP4Weight(StackableWeight):
    """A weight that checkpoints have in MXFP4, as they store it until `arrange_stack`."""

    def __init__(self, rows: int, columns: int) -> None:
        """Raises ConfigError in fp16."""
        super().__init__(rows, columns)
        if torch.get_default_dtype() == torch.float16:
            raise ConfigError(
                "--dtype float16: MXFP4 needs activations in bfloat16 or float32. Use --dtype "
                "bfloat16.",
                param="dtype",
            )
        groups = mxfp4.num_groups(columns)
        self.values = parameter(torch.zeros(rows, groups, mxfp4.GROUP // 2, dtype=torch.uint8))
        self.scales = parameter(torch.zeros(rows, groups, dtype=torch.uint8))

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def stack(self, count: int) -> Stack:
        rows = self.shape[0] // count
        words = self.values.view(-1).view(torch.int16).view(count, -1, rows, mxfp4.GROUP)
        return Stack(words, self.scales.view(-1).view(torch.int32).view(count, -1, rows))

    def holds(self, packing: Packing) -> bool:
        return isinstance(packing, Microscaled)

    def arrange_stack(self, count: int) -> None:
        if int(self.scales.max()) > mxfp4.MAX_SCALE:
            raise CheckpointError(
                f"A scale of the MXFP4 weights is 2 ** {int(self.scales.max()) - 127}, and at most "
                f"2 is supported. The checkpoint is damaged."
            )
        blocks = self.values.view(count, -1, *self.values.shape[1:])
        scales = self.scales.view(count, -1, self.scales.shape[1])
        for one in zip(blocks, scales, strict=True):
            mxfp4.arrange_(*one)

    def part_slots(
        self,
        rows: slice,
        shards: tuple[Shard, Shard],
        *,
        transpose: bool = False,
        order: tuple[int, ...] | None = None,
    ) -> dict[str, Slot]:
        groups = divided(shards[1], mxfp4.GROUP)
        own = slice(groups.count)
        parts = shards[0], groups
        return {
            "blocks": Slot(self.values[rows, own], shards=parts, order=order),
            "scales": Slot(self.scales[rows, own], shards=parts, order=order),
        }

    def write(self, rows: slice, decoded: Decoded) -> None:
        """Copy rows of integers that are twice the numbers. -0 becomes 0."""
        assert isinstance(decoded, Groups), "its packing decodes to integers"
        own = slice(decoded.scales.shape[1])
        numbers, scales = mxfp4.encode(decoded.values, decoded.scales)
        blocks = pack_nibbles(numbers).view(len(numbers), -1, mxfp4.GROUP // 2)
        self.values[rows, own].copy_(blocks)
        self.scales[rows, own].copy_(scales)

    def fill_randomly(self, generator: torch.Generator) -> None:
        columns = slice(self.shape[1] // mxfp4.GROUP)
        self.values[:, columns].random_(0, 256, generator=generator)
        self.scales[:, columns].random_(*_DUMMY_SCALES, generator=generator)
