"""Recorded lifetimes, idle times and reuse gaps of cached blocks."""

from __future__ import annotations

from toolkit.scheduler.blocks.block_pool import BlockPool
from toolkit.scheduler.blocks.block_watch import SAMPLED, BlockWatch


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_block_lives_from_registration_until_it_is_overwritten():
    clock = Clock()
    pool = BlockPool(1)  # block 0 is in the sample
    pool.watch = BlockWatch(clock)
    assert pool.allocate(1) == [0]
    pool.register(0, b"its content")
    clock.now += 3
    pool.release([0])
    clock.now += 5
    pool.share(pool.find([b"its content"]))
    clock.now += 1
    pool.release([0])
    clock.now += 10
    assert pool.watch.take() == [[], [], [5.0]]
    pool.allocate(1)
    assert pool.watch.take() == [[19.0], [10.0], []]
    assert pool.watch.take() == []


def test_a_block_without_content_is_not_recorded():
    pool = BlockPool(1)
    for _ in range(3):
        pool.release(pool.allocate(1))
    assert pool.watch.take() == []


def test_only_a_sample_is_watched():
    pool = BlockPool(2 * SAMPLED)
    blocks = pool.allocate(2 * SAMPLED)
    for block in blocks:
        pool.register(block, bytes([block]))
    pool.release(blocks)
    pool.allocate(2 * SAMPLED)
    lifetimes, idle, reuse_gaps = pool.watch.take()
    assert (len(lifetimes), len(idle), len(reuse_gaps)) == (2, 2, 0)
