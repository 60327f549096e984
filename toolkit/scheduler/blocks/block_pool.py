"""KV cache blocks: reference counts, and the prefix cache over their content."""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

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

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference from each block of a request, given in token order.

        The last blocks are reused first: the beginning of a prompt is shared more often."""
        for block in reversed(blocks):
            references = self._references[block] - 1
            if references < 0:
                raise RuntimeError(f"block {block} was released more often than it was taken")
            self._references[block] = references
            self.watch.on_release(block)
            if references == 0:
                self._free[block] = None
                if self._hash_of[block] is None:
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

    def num_references(self, block: int) -> int:
        return self._references[block]

    def num_free_among(self, blocks: Sequence[int]) -> int:
        """Return how many of the blocks are free: sharing them leaves fewer to allocate."""
        return sum(self._references[block] == 0 for block in blocks)

    def evict_all(self) -> None:
        """Empty the prefix cache. Blocks in use stay in use."""
        self._block_of.clear()
        self._hash_of = [None] * self.num_blocks

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


def hash_block(parent: BlockHash, tokens: bytes, extra: str = "") -> BlockHash:
    """Return 16 bytes of BLAKE2b over the parent's hash, the tokens (int32) and an extra key.

    The hash is cryptographic because a collision would show one user the cache of another."""
    return blake2b(b"".join((parent, tokens, extra.encode())), digest_size=16).digest()
