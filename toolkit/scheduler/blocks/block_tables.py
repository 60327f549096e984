"""Blocks of requests: block tables, the prefix cache, and copies in host memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.cache_group import ONE_GROUP, CacheGroup, first_columns
from toolkit.scheduler.blocks.block_pool import BlockHash, BlockPool, HostBlockPool, hash_block
from toolkit.scheduler.request import HOLE, Request

UNTAGGED = b""


@dataclass(frozen=True, slots=True)
class Cached:
    """The part of a request's beginning that the prefix cache has.

    `tables` are like `Request.blocks`, for `length` tokens."""

    length: int
    tables: list[list[int]]
    branch: int = 0
    """Tokens that another request has, too: `length`, or more if their windows are lost."""


class BlockTables:
    """Gives requests their pages from the pools of the device and of the host.

    The tables are `Request.blocks` and `Request.host_blocks`. Groups that read few tokens free the
    others when a request grows (`trim`). Freed pages are reused first, except before an *anchor*:
    the end of a prompt, or where prompts part. Another request may begin there."""

    def __init__(
        self,
        num_blocks: int,
        num_host_blocks: int,
        block_size: int,
        groups: Sequence[CacheGroup] = ONE_GROUP,
        max_model_len: int = 0,
    ) -> None:
        """`num_blocks`, `num_host_blocks`: pages of the pools."""
        self.block_size, self.groups = block_size, tuple(groups)
        self.pool = BlockPool(num_blocks)
        self.host_pool = HostBlockPool(num_host_blocks)
        self.page_tokens = [block_size * group.blocks_per_page for group in self.groups]
        self.grain = math.lcm(
            *(
                tokens
                for tokens, group in zip(self.page_tokens, self.groups, strict=True)
                if not group.feature
            )
        )
        """Tokens; lengths of cached prefixes are multiples of it."""
        self._tags = [UNTAGGED, *(bytes([g]) for g in range(1, len(self.groups)))]
        self._columns = first_columns(self.groups, block_size, max_model_len)
        self._freeing = [g for g, group in enumerate(self.groups) if group.frees]
        self._features = [g for g, group in enumerate(self.groups) if group.feature]
        self._of_tokens = [g for g, group in enumerate(self.groups) if not group.feature]

    @property
    def frees(self) -> bool:
        """True if requests free tokens while they run."""
        return bool(self._freeing)

    @property
    def has_features(self) -> bool:
        """True if pages have features, which all tokens of their requests read."""
        return bool(self._features)

    # ---- sizes

    def capacity(self, request: Request) -> int:
        """Return the tokens for which a request has pages."""
        return min(len(request.blocks[g]) * self.page_tokens[g] for g in self._of_tokens)

    def missing(self, request: Request, end: int) -> list[int]:
        """Return how many pages a request lacks for its first `end` tokens, by group."""
        return [
            max(0, -(-end // self.page_tokens[g]) - len(request.blocks[g])) for g in self._of_tokens
        ]

    # ---- the prefix cache

    def find_cached(self, request: Request) -> Cached:
        """Return what is cached of the request's beginning. At least one token remains."""
        if not request.cacheable or request.computes_all:
            return self.nothing(request)
        most = (request.num_tokens - 1) // self.block_size
        hashes = request.hashes(most, self.block_size)
        length = most * self.block_size // self.grain * self.grain
        tables = self.nothing(request).tables
        for g in self._of_tokens:
            if not self.groups[g].frees:
                tables[g] = self.pool.find(self._keys(g, hashes, 0, length))
                length = len(tables[g]) * self.page_tokens[g] // self.grain * self.grain
        longest, before = length if len(self._freeing) < len(self._of_tokens) else 0, -1
        while self._freeing and length != before:
            before = length
            for g in self._freeing:
                length = self._covered(g, hashes, length)
        for g in self._of_tokens:
            if g in self._freeing:
                first = self._first_page(g, length)
                found = self.pool.find(self._keys(g, hashes, first, length))
                tables[g] = [HOLE] * first + found
            del tables[g][length // self.page_tokens[g] :]
        return Cached(length, tables, max(longest, length))

    def nothing(self, request: Request) -> Cached:
        """Return that none of the request's tokens is cached. Its feature may be."""
        tables: list[list[int]] = [[] for _ in self.groups]
        if request.cacheable:
            for g in self._features:
                tables[g] = self.pool.find(self._feature_keys(g, request))
        return Cached(0, tables)

    def lacks_feature(self, cached: Cached) -> bool:
        """Return True if the devices have to compute the feature of a request."""
        return any(len(cached.tables[g]) < self._num_pages(g) for g in self._features)

    @property
    def feature_tokens(self) -> int:
        """Tokens of a feature that has pages; 0: none has."""
        return sum(self.groups[g].feature for g in self._features)

    def feature_pages(self, request: Request) -> list[int]:
        """Return the pages of a request's feature."""
        return [page for g in self._features for page in request.blocks[g]]

    def _num_pages(self, g: int) -> int:
        """Return the number of pages of a feature in its group."""
        return -(-self.groups[g].feature // self.page_tokens[g])

    def _feature_keys(self, g: int, request: Request) -> list[BlockHash]:
        """Return the keys of a feature's pages. The salt has its digest (`cache_key`).

        Requests take and release all pages of a feature together, the last one first: those that
        are left after an eviction are the first ones."""
        salt = request.cache_salt
        return [
            hash_block(b"", index.to_bytes(4, "little"), salt) + self._tags[g]
            for index in range(self._num_pages(g))
        ]

    def _covered(self, g: int, hashes: Sequence[BlockHash], length: int) -> int:
        """Return the longest prefix, `length` at most, whose last tokens are cached in a group."""
        tokens = self.page_tokens[g]
        while length:
            for index in range(length // tokens - 1, self._first_page(g, length) - 1, -1):
                if not self.pool.has(self._key(g, hashes, index)):
                    length = index * tokens // self.grain * self.grain
                    break
            else:
                return length
        return 0

    def _first_page(self, g: int, position: int) -> int:
        """Return the first page that the token at a position reads in a group."""
        return self.groups[g].first_key(position) // self.page_tokens[g]

    def _key(self, g: int, hashes: Sequence[BlockHash], index: int) -> BlockHash:
        """Return the key of a group's page: the hash at its end, and the group."""
        return hashes[(index + 1) * self.groups[g].blocks_per_page - 1] + self._tags[g]

    def _keys(
        self, g: int, hashes: Sequence[BlockHash], first: int, length: int
    ) -> list[BlockHash]:
        return [self._key(g, hashes, i) for i in range(first, length // self.page_tokens[g])]

    def register(self, request: Request) -> None:
        """Add the request's full pages to the prefix cache, as far as their tokens are known.

        Those of the step being scheduled count: a later reader's step runs after it, or the same
        step writes them before they are read."""
        if not request.cacheable:
            return
        known = min(request.num_computed_tokens, request.num_known_tokens)
        for g in self._of_tokens:
            first, full = request.num_registered[g], known // self.page_tokens[g]
            if first < full:
                count = full * self.groups[g].blocks_per_page
                hashes = request.hashes(count, self.block_size)
                table = request.blocks[g]
                for index in range(first, full):
                    if table[index] != HOLE:
                        self.pool.register(table[index], self._key(g, hashes, index))
                request.num_registered[g] = full

    # ---- requests

    def begin(self, request: Request, cached: Cached, num_computed: int, end: int) -> bool:
        """Give a request the cached pages, and others for its tokens from num_computed to `end`.

        Return False, with nothing changed, if too few are free. num_computed: tokens that it has,
        cached or in host memory."""
        position = min(num_computed, request.num_known_tokens - 1)
        shared = held_pages(cached.tables)
        needs = []
        for g, tokens in enumerate(self.page_tokens):
            held = len(cached.tables[g])
            if g in self._features:
                needs.append(self._num_pages(g) - held)
                continue
            if not held:
                held = self._first_page(g, position)
                cached.tables[g] += [HOLE] * held
            needs.append(-(-end // tokens) - held)
        if sum(needs) > self.pool.num_free - self.pool.num_free_among(shared):
            return False
        self.pool.share(shared)
        fresh = self.pool.allocate(sum(needs))
        assert fresh is not None
        request.blocks, request.num_registered, at = [], [], 0
        for table, need in zip(cached.tables, needs, strict=True):
            request.num_registered.append(len(table) if shared else 0)
            request.blocks.append(table + fresh[at : at + need])
            at += need
        request.num_trimmed = [self._first_page(g, position) for g in range(len(self.groups))]
        self._set_anchors(request, cached.branch)
        if request.cacheable:  # the step that begins the request computes its feature first
            for g in self._features:
                for page, key in zip(
                    request.blocks[g], self._feature_keys(g, request), strict=True
                ):
                    self.pool.register(page, key)
        return True

    def grow(
        self,
        requests: Sequence[Request],
        positions: Sequence[int],
        ends: Sequence[int],
        new_blocks: list[int],
        *,
        for_followers: bool = True,
    ) -> list[int] | None:
        """Give requests pages for their first `ends` tokens, after freeing what windows have left.

        positions, for_followers: see `trim`; unused if no group frees tokens. Append (row, column,
        page) of each page to `new_blocks`. Return the tokens for which each request has pages then.
        None, with no page given: too few are free."""
        self.trim(requests, positions, for_followers=for_followers)
        needs = []
        for g in self._of_tokens:
            tokens, tables = self.page_tokens[g], [request.blocks[g] for request in requests]
            lengths = [
                -(-end // tokens) - len(table) for table, end in zip(tables, ends, strict=True)
            ]
            needs.append((self._columns[g], tokens, tables, lengths))
        pages = self.pool.allocate(sum(n for *_, lengths in needs for n in lengths if n > 0))
        if pages is None:
            return None
        pages.reverse()
        capacities: list[int] | None = None
        for first, tokens, tables, lengths in needs:
            for request, table, length in zip(requests, tables, lengths, strict=True):
                for _ in range(length):
                    page = pages.pop()
                    new_blocks += request.row, first + len(table), page
                    table.append(page)
            held = [len(table) * tokens for table in tables]
            capacities = held if capacities is None else list(map(min, capacities, held))
        return capacities

    def release(self, request: Request) -> None:
        """Take all pages from a request. Full ones stay in the prefix cache."""
        for g, table in enumerate(request.blocks):
            self.pool.release(held_pages([table]) if g in self._freeing else table)
        request.blocks = []

    # ---- windows

    def trim(
        self,
        requests: Sequence[Request],
        positions: Sequence[int],
        *,
        for_followers: bool = True,
    ) -> None:
        """Free the pages of tokens that the ones from these positions on do not read.

        positions: of the first token that a later step may compute. Drafts may be wrong, so it is
        no later than the newest known token. for_followers: keep what siblings begin with."""
        if not self._freeing:
            return
        kept: list[int] = []
        idle: list[int] = []
        for request, position in zip(requests, positions, strict=True):
            trimmed = request.num_trimmed
            if request.num_followers and for_followers:
                position = min(position, request.anchors[0])
            for g in self._freeing:
                first = self._first_page(g, position)
                if first <= trimmed[g]:
                    continue
                table = request.blocks[g]
                for index in range(trimmed[g], min(first, len(table))):
                    page, table[index] = table[index], HOLE
                    if page != HOLE:
                        (kept if self._is_kept(request, g, index) else idle).append(page)
                trimmed[g] = first
        self.pool.release(idle, reuses_first=True)
        self.pool.release(kept)

    def _set_anchors(self, request: Request, branch: int) -> None:
        """Note where other requests may begin: before a prompt's last token, and at `branch`."""
        if self._freeing:
            end = (request.num_prompt_tokens - 1) // self.grain * self.grain
            request.anchors = (end, branch) if branch else (end,)

    def _is_kept(self, request: Request, g: int, index: int) -> bool:
        """Return True if a request that begins at an anchor reads a page."""
        tokens = self.page_tokens[g]
        if index * tokens >= max(request.anchors):
            return False
        return any(
            index * tokens < anchor and self.groups[g].first_key(anchor) < (index + 1) * tokens
            for anchor in request.anchors
        )

    # ---- host memory

    def swap_out(self, request: Request) -> list[tuple[int, int]]:
        """Return (page, host page) copies that keep the computed tokens, or [] without room.

        A feature stays where it is until its pages are evicted. Then it is computed again."""
        if not self.host_pool.num_blocks:
            return []
        computed = request.num_computed_tokens
        self.trim([request], [request.first_uncomputed])
        tables = [
            [] if group.feature else table[: -(-computed // tokens)]
            for table, tokens, group in zip(
                request.blocks, self.page_tokens, self.groups, strict=True
            )
        ]
        pages = held_pages(tables)
        host_pages = self.host_pool.allocate(len(pages))
        if not host_pages:
            return []
        free = iter(host_pages)
        request.host_blocks = [
            [HOLE if page == HOLE else next(free) for page in table] for table in tables
        ]
        return list(zip(pages, host_pages, strict=True))

    def swap_in(self, request: Request) -> list[tuple[int, int]]:
        """Return (host page, page) copies into the pages that the request has got."""
        copies = [
            (host, page)
            for tables in zip(request.host_blocks, request.blocks, strict=True)
            for host, page in zip(*tables, strict=False)
            if HOLE not in (host, page)
        ]
        self.release_host(request)
        return copies

    def release_host(self, request: Request) -> None:
        """Take the host's pages from a request."""
        self.host_pool.release(held_pages(request.host_blocks))
        request.host_blocks = []


def held_pages(tables: Sequence[Sequence[int]]) -> list[int]:
    """Return the pages of tables, without holes."""
    return [page for table in tables for page in table if page != HOLE]
