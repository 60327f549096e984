"""KV cache blocks: reference counts, and the prefix cache over their content."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import chain

from toolkit.scheduler.blocks.block_watch import BlockWatch

BlockHash = bytes


class BlockPool:
    """Fixed-size blocks with reference counts and a prefix cache.

    A full block is found by the hash of all tokens up to its end. A block without references is
    free but can still be found until it is allocated again. The free list is in
    least-recently-used order, blocks without content first. Every operation is O(1) per block."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.watch = BlockWatch()
        self._references = [0] * num_blocks
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._block_of: dict[BlockHash, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        return 1.0 - self.num_free / self.num_blocks

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` blocks with one reference each, or None if fewer are free."""
        if count > len(self._free):
            return None
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._evict(block)
            self.watch.on_allocate(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1
            self.watch.on_share(block)

    def release(self, blocks: Sequence[int], *, reuses_first: bool = False) -> None:
        """Drop a reference from each block of a request, given in token order.

        The last blocks are reused first: the beginning of a prompt is shared more often.
        reuses_first: before all others."""
        for block in reversed(blocks):
            references = self._references[block] - 1
            if references < 0:
                raise RuntimeError(f"block {block} was released more often than it was taken")
            self._references[block] = references
            self.watch.on_release(block)
            if references == 0:
                self._free[block] = None
                if reuses_first or self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def register(self, block: int, block_hash: BlockHash) -> None:
        """Add a full block to the prefix cache. Of equal blocks the first one is kept."""
        if self._hash_of[block] is None and block_hash not in self._block_of:
            self._hash_of[block] = block_hash
            self._block_of[block_hash] = block

    def find(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Return the blocks of the longest cached prefix of `hashes`, without references."""
        found = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def has(self, block_hash: BlockHash) -> bool:
        """Return True if a block with this hash is found."""
        return block_hash in self._block_of

    def num_references(self, block: int) -> int:
        return self._references[block]

    def num_free_among(self, blocks: Sequence[int]) -> int:
        """Return how many of the blocks are free: sharing them leaves fewer to allocate."""
        return sum(self._references[block] == 0 for block in blocks)

    def evict_all(self) -> None:
        """Empty the prefix cache. Blocks in use stay in use."""
        self._block_of.clear()
        self._hash_of = [None] * self.num_blocks

    def problem(self, held: Iterable[Sequence[int]]) -> str | None:
        """Return what is wrong if requests hold these blocks, and no other has any; None: nothing.

        Every block is free or held by as many requests as it has references."""
        counts = Counter(chain.from_iterable(held))
        return None if self._is_consistent(counts) else self._find_problem(counts)

    def _is_consistent(self, counts: Counter[int]) -> bool:
        """Return True if nothing is wrong. Compares lists at once: it runs after each test step."""
        expected = [0] * self.num_blocks
        for block, count in counts.items():
            if not 0 <= block < self.num_blocks or block in self._free:
                return False
            expected[block] = count
        num_hashes = self.num_blocks - self._hash_of.count(None)
        return (
            expected == self._references
            and len(self._free) == expected.count(0)
            and num_hashes == len(self._block_of)
            and all(self._hash_of[block] == hash for hash, block in self._block_of.items())
        )

    def _find_problem(self, counts: Counter[int]) -> str | None:
        """Visit each block. Return what is wrong."""
        for block in {*range(self.num_blocks), *counts}:
            if not 0 <= block < self.num_blocks:
                return f"a request holds block {block} of {self.num_blocks}"
            references, free = self._references[block], block in self._free
            if references != counts[block]:
                return f"block {block} has {references} references and {counts[block]} requests"
            if free == (references > 0):
                return (
                    f"block {block} has {references} references and is {'' if free else 'not '}free"
                )
            block_hash = self._hash_of[block]
            if block_hash is not None and self._block_of.get(block_hash) != block:
                return f"block {block} has a hash by which it is not found"
        lost = [block for hash, block in self._block_of.items() if self._hash_of[block] != hash]
        return f"block {lost[0]} is found by a hash that it does not have" if lost else None

    def _evict(self, block: int) -> None:
        block_hash = self._hash_of[block]
        if block_hash is not None:
            del self._block_of[block_hash]
            self._hash_of[block] = None
            self.watch.on_evict(block)


class HostBlockPool:
    """Blocks in host memory, for the KV cache of preempted requests."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` blocks, or None if fewer are free."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def release(self, blocks: Sequence[int]) -> None:
        self._free.extend(blocks)

    def problem(self, held: Iterable[Sequence[int]]) -> str | None:
        """Return what is wrong if requests hold these blocks, and no others; None: nothing."""
        found = sorted((*chain.from_iterable(held), *self._free))
        if found == list(range(self.num_blocks)):
            return None
        return f"{len(found)} blocks of the host are free or held, of {self.num_blocks}"


def hash_block(parent: BlockHash, tokens: bytes, extra: str = "") -> BlockHash:
    """Return 16 bytes of BLAKE2b over the parent's hash, the tokens (int32) and an extra key.

    The hash is cryptographic because a collision would show one user the cache of another."""
    return blake2b(b"".join((parent, tokens, extra.encode())), digest_size=16).digest()
