"""Blocks of requests: block tables, the prefix cache, and copies in host memory."""

from toolkit.scheduler.blocks.block_pool import BlockPool, HostBlockPool
from toolkit.scheduler.request import Request


class BlockTables:
    """Gives requests their blocks from the pools of the device and of the host.

    The tables are `Request.blocks` and `Request.host_blocks`."""

    def __init__(self, num_blocks: int, num_host_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.host_pool = HostBlockPool(num_host_blocks)

    def num_for(self, num_tokens: int) -> int:
        """Return how many blocks hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def find_cached(self, request: Request) -> list[int]:
        """Return cached blocks of the request's beginning. At least one token remains."""
        if not request.cacheable or request.wants_prompt_logprobs:
            return []
        most = (request.num_tokens - 1) // self.block_size
        return self.pool.find(request.hashes(most, self.block_size)[:most])

    def begin(self, request: Request, cached: list[int], num_tokens: int) -> bool:
        """Give a request the cached blocks, and others for the rest of its first tokens.

        Return False, with nothing changed, if too few are free."""
        need = self.num_for(num_tokens) - len(cached)
        if need > self.pool.num_free - self.pool.num_free_among(cached):
            return False
        self.pool.share(cached)
        fresh = self.pool.allocate(need)
        assert fresh is not None
        request.blocks = cached + fresh
        request.num_registered_blocks = len(cached)
        return True

    def register(self, request: Request) -> None:
        """Add the request's full blocks to the prefix cache, as far as their tokens are known.

        Blocks of the step being scheduled count: a later reader's step runs after it, or the same
        step writes them before they are read."""
        first = request.num_registered_blocks
        full = min(request.num_computed_tokens, request.num_known_tokens) // self.block_size
        if first < full and request.cacheable:
            hashes = request.hashes(full, self.block_size)
            for index in range(first, full):
                self.pool.register(request.blocks[index], hashes[index])
            request.num_registered_blocks = full

    def release(self, request: Request) -> None:
        """Take all blocks from a request. Full ones stay in the prefix cache."""
        self.pool.release(request.blocks)
        request.blocks = []

    def swap_out(self, request: Request) -> list[tuple[int, int]]:
        """Return (block, host block) copies that keep the computed tokens, or [] without room."""
        if not self.host_pool.num_blocks:
            return []
        host_blocks = self.host_pool.allocate(self.num_for(request.num_computed_tokens))
        if not host_blocks:
            return []
        request.host_blocks = host_blocks
        return list(zip(request.blocks, host_blocks, strict=False))

    def swap_in(self, request: Request) -> list[tuple[int, int]]:
        """Return (host block, block) copies into the blocks that the request has got."""
        copies = list(zip(request.host_blocks, request.blocks, strict=False))
        self.release_host(request)
        return copies

    def release_host(self, request: Request) -> None:
        """Take the host's blocks from a request."""
        self.host_pool.release(request.host_blocks)
        request.host_blocks = []
