"""Memory of layers: what they keep between steps, in which shapes. Imports no torch.

A description declares it (`describe.Mix.memory`). Worker, `tk show` and `--dry-run` read the
layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import lcm
from typing import Literal, Self

from msgspec import structs

from toolkit.cache_group import ONE_GROUP, CacheGroup, longest_sequence, most_pages

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
    window: int = 0  # tokens that a token reads, with itself; 0: all
    chunk: int = 0
    """A token reads those of its chunk alone, which begins at a multiple of `chunk` tokens; 0: not.
    """
    feature: int = 0
    """Tokens of a feature, whose encoder writes them; all tokens of a request read them. 0: tokens
    write their own."""

    @classmethod
    def of_keys(
        cls, num_kv_heads: int, head_size: int, window: int = 0, chunk: int = 0, feature: int = 0
    ) -> Self:
        """Return the memory of keys and values."""
        return cls((Part(num_kv_heads, head_size),) * 2, window, chunk, feature)


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

ALIGNED = 256  # bytes at a multiple of which each page and block of several groups begins
MOST_UNIT = 2**16  # bytes to which pages are padded at most so that blocks begin at whole tokens
MOST_BLOCKS = 12  # of a page


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """Memory of layers on one rank. A block number finds the tokens of all layers of a group.

    Each layer has tensors of its own shape: [blocks, block size, heads, size] for each part of its
    memory of tokens, [slots, heads, size] for each part of its memory of rows. With several groups,
    blocks lie in pages of as many bytes for each (`CacheGroup`)."""

    layers: tuple[Memory, ...]
    block_size: int  # tokens
    itemsize: int  # bytes of an element in blocks
    row_itemsize: int  # and in the memory of rows
    state_type: StateType = "float32"  # of its parts that are `in_float32`
    drafter: tuple[Memory, ...] = ()  # of the drafter's layers, which are in the first group
    groups: tuple[CacheGroup, ...] = ONE_GROUP
    most_step: int = 1  # tokens of a sequence that a step computes, or that are not known

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

    def with_groups(self, max_model_len: int, most_step: int) -> Self:
        """Return the layout of all stages' layers with the groups that free most.

        most_step: see `cache_group.most_step`. Layers whose windows are no shorter than sequences
        keep all tokens, as do all layers next to states, and those that a drafter follows."""
        kinds = dict.fromkeys(_kind(one, max_model_len) for one in self.of_tokens)
        has_states = any(isinstance(one, RowMemory) for one in self.layers)
        if has_states or (self.drafter and CacheGroup() not in kinds):
            kinds = dict.fromkeys([CacheGroup(), *(one for one in kinds if one.feature)])
        found = tuple(sorted(kinds, key=_rank)) or ONE_GROUP
        if len(found) > 1:
            counts = min(
                product(range(1, MOST_BLOCKS + 1), repeat=len(found)),
                key=lambda counts: self._waste(found, counts, max_model_len),
            )
            found = _with_counts(found, counts)
        return replace(self, groups=found, most_step=most_step)

    def with_groups_of(self, whole: Self) -> Self:
        """Return the layout of a stage's layers with the groups of all stages."""
        return replace(self, groups=whole.groups, most_step=whole.most_step)

    def pages_of(self, length: int) -> int:
        """Return the most pages that a sequence has at once."""
        return most_pages(self.groups, self.block_size, length, self.most_step)

    def pages_in_decode(self, length: int) -> int:
        """Return the pages of a sequence of this length that decodes."""
        return most_pages(self.groups, self.block_size, length, 1)

    def longest(self, num_pages: int) -> int:
        """Return the tokens of the longest sequence that fits into pages."""
        return longest_sequence(self.groups, self.block_size, num_pages, self.most_step)

    def num_tokens(self, num_pages: int, length: int) -> int:
        """Return how many tokens pages hold, in sequences of a length that decode."""
        if self.groups == ONE_GROUP:
            return num_pages * self.block_size
        return num_pages * length // self.pages_in_decode(length)

    def _waste(
        self, groups: tuple[CacheGroup, ...], counts: tuple[int, ...], length: int
    ) -> tuple[int, int]:
        """Return how much sequences waste in pages of so many blocks, and a prefix's grain.

        In steps of 4 % of what they keep, for short and long ones; in blocks. Less is better."""
        sized, ratios = replace(self, groups=_with_counts(groups, counts)), []
        for tokens in (max(max(one.window, one.chunk) for one in groups), length):
            pages = most_pages(sized.groups, self.block_size, tokens, 1)
            kept = sum(
                self.group_bytes(g, groups) * one.most_pages(self.block_size, tokens, 1)
                for g, one in enumerate(groups)
            )
            ratios.append(pages * sized.page_bytes / kept)
        return int(25 * sum(ratios) / len(ratios)), lcm(*counts)

    @property
    def drafts(self) -> Self:
        """The layout of the drafter alone, whose pages have blocks of the first group."""
        return replace(self, layers=self.drafter, drafter=(), groups=self.groups[:1])

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, without the drafter's."""
        counts = [group.blocks_per_page for group in self.groups]
        most = max(self.group_bytes(g) * count for g, count in enumerate(counts))
        unit = lcm(*counts) * self._unit if len(counts) > 1 else 1
        return -(-most // unit) * unit

    @property
    def block_bytes(self) -> int:
        """Bytes of what a block number stands for in all layers, with those of the drafter: of a
        page, if there are groups."""
        drafts = sum(map(self.layer_bytes, self._of_tokens(*self.drafter)))
        return self.page_bytes + drafts * self.groups[0].blocks_per_page

    def group_of(self, memory: TokenMemory) -> int:
        """Return the group of a layer. Those that no group suits are in the first."""
        return _group_of(memory, self.groups)

    def group_bytes(self, g: int, groups: Sequence[CacheGroup] | None = None) -> int:
        """Return the bytes of a block of a group's layers."""
        own = self.groups if groups is None else groups
        return sum(self.layer_bytes(one) for one in self.of_tokens if _group_of(one, own) == g)

    def places(self) -> list[list[int]]:
        """Return where the parts of each layer are in a group's block: offsets in bytes."""
        ends, found = [0] * len(self.groups), []
        for one in self.of_tokens:
            g, own = self.group_of(one), []
            for part in one.parts:
                own.append(ends[g])
                ends[g] += self.block_size * self.itemsize * part.count
            found.append(own)
        return found

    @property
    def _unit(self) -> int:
        """Bytes of which each block is a multiple: of a token in each part, if that is not much."""
        unit = lcm(ALIGNED, *(p.count * self.itemsize for one in self.of_tokens for p in one.parts))
        return unit if unit <= MOST_UNIT else ALIGNED

    def padding(self, g: int) -> float:
        """Return the part of a group's pages that no layer uses."""
        used = self.group_bytes(g) * self.groups[g].blocks_per_page
        return 1 - used / self.page_bytes if self.page_bytes else 0.0

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


def _kind(memory: TokenMemory, max_model_len: int) -> CacheGroup:
    """Return a layer's group, with one block in a page."""
    if memory.feature:
        return CacheGroup(feature=memory.feature)
    frees = 0 < max(memory.window, memory.chunk) < max_model_len
    return CacheGroup(memory.window, memory.chunk) if frees else CacheGroup()


def _rank(group: CacheGroup) -> tuple[int, int, int]:
    """Return the place of a group: that of all tokens first, features last."""
    return group.feature, group.window, group.chunk


def _group_of(memory: TokenMemory, groups: Sequence[CacheGroup]) -> int:
    ranks = [_rank(one) for one in groups]
    own = memory.feature, memory.window, memory.chunk
    return ranks.index(own) if own in ranks else 0


def _with_counts(groups: tuple[CacheGroup, ...], counts: tuple[int, ...]) -> tuple[CacheGroup, ...]:
    """Return groups with these numbers of blocks in a page."""
    return tuple(
        structs.replace(one, blocks_per_page=count)
        for one, count in zip(groups, counts, strict=True)
    )
