"""State slots: where the devices keep requests' states (`models.memory.RowMemory`).

Each running request has a slot, which its steps read and write. Other slots have snapshots: states
after the first tokens of a sequence, a multiple of the grain. The step that computes these tokens
writes the snapshot in addition to the request's own state; a request that begins with the same
tokens reads it once, in place of its own slot. So a state is copied for one reason only: a
preempted request's to a slot in host memory, and back (`swap_out`, `swap_in`).

With drafts, a step's state has as many tokens as were accepted before it, which is known only
later. So each step that may pass a snapshot's place writes it if it does, and it is registered once
a step must have passed it."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from toolkit.scheduler.blocks.block_pool import BlockHash
from toolkit.scheduler.blocks.block_tables import Cached
from toolkit.scheduler.request import NO_SLOT, Request

GRAIN = 64  # tokens between places where a snapshot can be


@dataclass(slots=True, eq=False)
class Snapshot:
    """State after the first `length` tokens of a sequence."""

    slot: int
    length: int
    written: int  # number of the step that writes it, at the latest: later ones may read it
    is_end: bool  # near a prompt's end, or where two prompts part: it is evicted last
    key: BlockHash = b""  # hash of its last block; empty until its tokens are known
    last_read: int = -1  # number of the last step that reads it
    leader: Request | None = None  # whose siblings may begin with it (n > 1)
    is_passed: bool = True  # in step `written`, or before


class _Need(enum.IntEnum):
    """Snapshots that may be evicted for a slot."""

    PLAIN = 0  # those that are no ends
    END = 1  # those that no sibling waits for
    RUN = 2  # all


class StateSlots:
    """Gives each running request a slot, and snapshots the others.

    Within a step, a slot that one request reads or writes is given to no other: requests of a step
    are computed side by side."""

    def __init__(
        self,
        count: int,
        grain: int,
        block_size: int,
        num_host_slots: int = 0,
        *,
        has_drafts: bool = False,
    ) -> None:
        """`grain`: tokens, a multiple of the block size. has_drafts: steps verify drafts."""
        self._free = list(range(count - 1, -1, -1))
        self._free_on_host = list(range(num_host_slots - 1, -1, -1))
        self._counts = count, num_host_slots
        self.grain, self._block_size, self._has_drafts = grain, block_size, has_drafts
        self._known: dict[BlockHash, Snapshot] = {}
        self._plain: OrderedDict[Snapshot, None] = OrderedDict()  # least recently used first
        self._ends: OrderedDict[Snapshot, None] = OrderedDict()
        self._pending: dict[Request, list[Snapshot]] = {}
        """Snapshots of tokens that are not known yet."""
        self.unpassed: set[Request] = set()
        """Requests whose next step writes a snapshot, unless an earlier one has. Read only."""
        self._passed: dict[Request, Snapshot] = {}  # the newest that each has passed while decoding
        self._step = 0

    def begin_step(self, number: int) -> None:
        """Begin to plan a step."""
        self._step = number

    # ---- requests that begin

    def begin_with(self, request: Request, cached: Cached) -> tuple[Snapshot | None, Cached]:
        """Return the longest snapshot of a request's cached tokens, and what is cached up to it.

        Where its blocks go on for longer, other prompts part from it: `request.branch` says where
        its own snapshot will be, so that the next one begins there."""
        branches = []
        begin = None
        longest = cached.length // self.grain * self.grain
        for length in range(longest, 0, -self.grain):
            begin = self._known.get(request.block_hashes[length // self._block_size - 1])
            if begin is not None and begin.written < self._step:
                self._touch(begin)
                break
            branches.append(0 if begin is not None else length)  # 0: another request writes it
            begin = None
        request.branch = next(iter(branches), 0)
        length = 0 if begin is None else begin.length
        (blocks,) = cached.tables  # no model has windows next to states
        return begin, Cached(length, [blocks[: length // self._block_size]])

    def enter(self, request: Request, snapshot: Snapshot | None) -> int | None:
        """Give a slot to a request that begins. Return the slot that its first step reads.

        None: there is none before the next step."""
        if snapshot is not None:
            snapshot.last_read, before = self._step, snapshot.last_read
        slot = self._take(_Need.RUN)
        if slot is not None:
            request.state_slot = slot
            return slot if snapshot is None else snapshot.slot
        if snapshot is None or before == self._step:
            return None
        self._remove(snapshot)  # the request takes its slot over
        request.state_slot = snapshot.slot
        return snapshot.slot

    def leave(self, request: Request) -> None:
        """Take the slot from a request. Its snapshots stay, as far as their tokens are known."""
        self._register_known(request)
        for snapshot in self._pending.pop(request, ()):
            self._free.append(snapshot.slot)
        self.unpassed.discard(request)
        self._passed.pop(request, None)
        self._free.append(request.state_slot)
        request.state_slot = NO_SLOT

    # ---- requests that are swapped

    @property
    def has_host_slot(self) -> bool:
        """True if the host has room for another state."""
        return bool(self._free_on_host)

    def swap_out(self, request: Request) -> tuple[int, int]:
        """Return the (slot, host slot) copy that keeps the state. Needs `has_host_slot`."""
        request.host_slot = self._free_on_host.pop()
        return request.state_slot, request.host_slot

    def swap_in(self, request: Request) -> tuple[int, int]:
        """Return the (host slot, slot) copy into the slot that the request has got."""
        copy = request.host_slot, request.state_slot
        self.release_host(request)
        return copy

    def release_host(self, request: Request) -> None:
        """Take the host's slot from a request."""
        self._free_on_host.append(request.host_slot)
        request.host_slot = NO_SLOT

    # ---- siblings of a leader (n > 1)

    def is_ready(self, request: Request) -> bool:
        """Return False if the snapshot that the request begins with is still to come."""
        leader = request.leader
        if leader is None or leader.is_finished:
            return True
        if leader.wants_prompt_logprobs:  # they are reported before the siblings begin
            return False
        shared = self._last_boundary(leader)
        if not shared:
            return True
        if leader.num_computed_tokens < shared:
            return False
        found = self._known.get(self._key(leader, shared))
        return found is None or found.written < self._step

    # ---- snapshots

    def keep(self, request: Request, start: int, end: int) -> tuple[int, int] | None:
        """Choose a snapshot that the step may pass, which adds tokens to a request's state.

        Earlier steps' states have `start` tokens or fewer, this step's has `end` or fewer. Return
        (slot, number of tokens in it), or None."""
        self._register_known(request)
        if request in self.unpassed:
            return self._keep_on(request, self._pending[request][-1])
        length, is_end = self._wanted(request, start, end)
        if not length or not request.cacheable:
            return None
        key = self._key(request, length) if length <= request.num_known_tokens else b""
        if (found := self._known.get(key)) is not None:
            self._touch(found)
            return None
        slot = self._take(_Need.END if is_end else _Need.PLAIN)
        if slot is None:
            return None
        leader = request if request.num_followers and is_end else None
        snapshot = Snapshot(slot, length, self._step, is_end, leader=leader)
        if key:
            self._add(snapshot, key)
            if length > request.num_prompt_tokens:
                self._pass(request, snapshot)
        else:
            snapshot.is_passed = not self._has_drafts
            if self._has_drafts:
                self.unpassed.add(request)
            self._pending.setdefault(request, []).append(snapshot)
        return slot, length

    def _keep_on(self, request: Request, snapshot: Snapshot) -> tuple[int, int]:
        """Have the step write a snapshot that an earlier one may have written."""
        snapshot.written = self._step
        # A step's state has all tokens that are known before it, at least.
        snapshot.is_passed = snapshot.length <= request.num_known_tokens
        if snapshot.is_passed:
            self.unpassed.remove(request)
        return snapshot.slot, snapshot.length

    def clear(self) -> None:
        """Drop all snapshots: what was written is unknown."""
        for snapshot in [*self._known.values()]:
            self._drop(snapshot)
        for snapshots in self._pending.values():
            self._free += [snapshot.slot for snapshot in snapshots]
        self._pending.clear()
        self.unpassed.clear()
        self._passed.clear()

    def problem(self, requests: Collection[Request]) -> str | None:
        """Return what is wrong if these requests have slots, and no others; None: nothing."""
        pending = (one for snapshots in self._pending.values() for one in snapshots)
        kept = (one.slot for one in (*self._known.values(), *pending))
        slots = (*self._free, *kept, *(one.state_slot for one in requests))
        on_host = (*self._free_on_host, *(one.host_slot for one in requests))
        for name, numbers, count in zip(
            ("state slots", "the host's state slots"), (slots, on_host), self._counts, strict=True
        ):
            found = sorted(number for number in numbers if number != NO_SLOT)
            if found != list(range(count)):
                return f"{name} are free or held: {found}, of {count}"
        return None

    def _wanted(self, request: Request, start: int, end: int) -> tuple[int, bool]:
        """Return the length of the snapshot to keep, and whether it is an end; 0: none."""
        for length in (request.branch, self._last_boundary(request)):
            if start < length <= end:
                return length, True
        length = end // self.grain * self.grain
        return (length, False) if length > start else (0, False)

    def _last_boundary(self, request: Request) -> int:
        """Return the last boundary of a prompt after which a token is left to compute."""
        return (request.num_prompt_tokens - 1) // self.grain * self.grain

    def _key(self, request: Request, length: int) -> BlockHash:
        count = length // self._block_size
        return request.hashes(count, self._block_size)[count - 1]

    def _register_known(self, request: Request) -> None:
        """Register the snapshots whose tokens are known by now."""
        pending = self._pending.get(request)
        while pending and pending[0].is_passed and pending[0].length <= request.num_known_tokens:
            snapshot = pending.pop(0)
            key = self._key(request, snapshot.length)
            if key in self._known:
                self._free.append(snapshot.slot)
                continue
            self._add(snapshot, key)
            self._pass(request, snapshot)

    def _pass(self, request: Request, snapshot: Snapshot) -> None:
        """Replace the snapshot that a request has passed before, while decoding."""
        older = self._passed.get(request)
        if older is not None and older in self._plain and not self._is_busy(older):
            self._drop(older)
        self._passed[request] = snapshot

    def _add(self, snapshot: Snapshot, key: BlockHash) -> None:
        snapshot.key = key
        self._known[key] = snapshot
        (self._ends if snapshot.is_end else self._plain)[snapshot] = None

    def _touch(self, snapshot: Snapshot) -> None:
        (self._ends if snapshot.is_end else self._plain).move_to_end(snapshot)

    def _take(self, need: _Need) -> int | None:
        """Return a free slot, perhaps of a snapshot that is evicted for it."""
        if self._free:
            return self._free.pop()
        if (victim := next(self._victims(need), None)) is not None:
            self._remove(victim)
            return victim.slot
        for pending in self._pending.values() if need == _Need.RUN else ():
            if pending and pending[-1].is_passed and not self._is_busy(pending[-1]):
                return pending.pop().slot
        return None

    def _victims(self, need: _Need) -> Iterator[Snapshot]:
        """Yield the snapshots that can be evicted, in order."""
        yield from (one for one in self._plain if not self._is_busy(one))
        if need == _Need.PLAIN:
            return
        waited_for: list[Snapshot] = []
        for one in self._ends:
            if self._is_busy(one):
                continue
            if one.leader is not None and one.leader.num_followers:
                waited_for.append(one)
            else:
                yield one
        if need == _Need.RUN:
            yield from waited_for

    def _is_busy(self, snapshot: Snapshot) -> bool:
        """True if the step that is planned reads or writes it."""
        return self._step in (snapshot.written, snapshot.last_read)

    def _remove(self, snapshot: Snapshot) -> None:
        del self._known[snapshot.key]
        del (self._ends if snapshot.is_end else self._plain)[snapshot]

    def _drop(self, snapshot: Snapshot) -> None:
        self._remove(snapshot)
        self._free.append(snapshot.slot)
