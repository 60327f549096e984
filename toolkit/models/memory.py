"""Memory of layers: what they keep between steps, in which shapes. Imports no torch.

A description declares it (`describe.Mix.memory`). Worker, `tk show` and `--dry-run` read the
layout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, Self

StateType = Literal["float32", "bfloat16"]
STATE_BYTES: dict[StateType, int] = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of a layer's memory: a number of vectors for each token, or each request.

    Ranks share the heads. With fewer heads than ranks, several ranks have the same."""

    num_heads: int
    size: int  # of a head's vector
    in_float32: bool = False
    """Or as --mamba-ssm-cache-dtype says. Else as --kv-cache-dtype does; a memory of rows, in the
    type of the activations."""
    last_tokens: int = 0
    """Tokens whose vectors a memory of rows has, the last ones; 0: none are of a token.

    And of twice as many drafts as a step verifies: those of the step before, and its own."""

    def on_rank(self, num_ranks: int) -> Part:
        return replace(self, num_heads=max(1, self.num_heads // num_ranks))

    def with_drafts(self, most: int) -> Part:
        """Return the part if steps verify up to `most` drafts of a request."""
        if not self.last_tokens:
            return self
        return replace(self, size=self.size * (self.last_tokens + 2 * most), last_tokens=0)

    @property
    def count(self) -> int:
        """Number of elements, once drafts are counted."""
        return self.num_heads * self.size


@dataclass(frozen=True, slots=True)
class TokenMemory:
    """Memory of tokens. It lies in blocks, which a request's block table lists."""

    parts: tuple[Part, ...]  # such as keys and values
    window: int = 0
    """Tokens that a token reads, with itself; 0: all. Others are kept, too."""

    @classmethod
    def of_keys(cls, num_kv_heads: int, head_size: int, window: int = 0) -> Self:
        """Return the memory of keys and values."""
        return cls((Part(num_kv_heads, head_size),) * 2, window)


@dataclass(frozen=True, slots=True)
class RowMemory:
    """Memory of a fixed size for each running request, such as a recurrent state.

    A layer reads a request's in one slot, writes it in another or the same, and may write a
    snapshot (`attention.StateRows`). It starts from zeros where the step has the request's first
    token (`is_first`)."""

    parts: tuple[Part, ...]
    takes_drafts: bool = False
    """The layer leaves drafts out of the state that it writes, and adds them in the next step that
    begins after them (`StateRows.begins`)."""


Memory = TokenMemory | RowMemory


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """Memory of layers on one rank. A block number finds the tokens of all layers.

    Each layer has tensors of its own shape: [blocks, block size, heads, size] for each part of its
    memory of tokens, [slots, heads, size] for each part of its memory of rows."""

    layers: tuple[Memory, ...]
    block_size: int  # tokens
    itemsize: int  # bytes of an element in blocks
    row_itemsize: int  # and in the memory of rows
    state_type: StateType = "float32"  # of its parts that are `in_float32`
    drafter: tuple[Memory, ...] = ()  # of the drafter's layers, which have the same blocks

    @classmethod
    def of(
        cls,
        layers: Iterable[Memory],
        block_size: int,
        itemsize: int,
        row_itemsize: int,
        state_type: StateType = "float32",
        *,
        drafter: Iterable[Memory] = (),
        most_drafts: int = 0,
        num_ranks: int = 1,
    ) -> Self:
        """Return one rank's layout of complete layers. most_drafts: of a request in a step."""

        def own_part(part: Part) -> Part:
            return part.on_rank(num_ranks).with_drafts(most_drafts)

        own, drafts = (
            tuple(replace(one, parts=tuple(map(own_part, one.parts))) for one in those)
            for those in (layers, drafter)
        )
        return cls(own, block_size, itemsize, row_itemsize, state_type, drafts)

    @property
    def drafts(self) -> Self:
        """The layout of the drafter alone."""
        return replace(self, layers=self.drafter, drafter=())

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers, with those of the drafter."""
        return sum(self.layer_bytes(one) for one in self._of_tokens(*self.layers, *self.drafter))

    @property
    def row_bytes(self) -> int:
        """Bytes of a request's memory of rows in all layers."""
        return sum(
            part.count * (STATE_BYTES[self.state_type] if part.in_float32 else self.row_itemsize)
            for one in (*self.layers, *self.drafter)
            if isinstance(one, RowMemory)
            for part in one.parts
        )

    @property
    def has_float32_rows(self) -> bool:
        """True if the type of --mamba-ssm-cache-dtype is that of some part."""
        rows = (one for one in (*self.layers, *self.drafter) if isinstance(one, RowMemory))
        return any(part.in_float32 for one in rows for part in one.parts)

    def layer_bytes(self, memory: TokenMemory) -> int:
        """Return the bytes of a layer's part of a block."""
        return self.block_size * self.itemsize * sum(part.count for part in memory.parts)

    @property
    def of_tokens(self) -> list[TokenMemory]:
        """The model's layers with memory of tokens."""
        return self._of_tokens(*self.layers)

    @staticmethod
    def _of_tokens(*layers: Memory) -> list[TokenMemory]:
        return [one for one in layers if isinstance(one, TokenMemory)]

    def outside_windows(self, length: int) -> float:
        """Return the part of a sequence's blocks that is outside the layers' windows."""
        total = sum(map(self.layer_bytes, self.of_tokens)) * length
        outside = sum(
            self.layer_bytes(one) * max(0, length - one.window)
            for one in self.of_tokens
            if one.window
        )
        return outside / total if total else 0.0
