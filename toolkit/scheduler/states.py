"""State slots: where the devices keep requests' states (`models.memory.RowMemory`).

A step reads each request's state in one slot and writes it in one, mostly the same. So a state is
kept by writing to another slot, and shared by reading it from several requests: nothing is copied.
"""

from toolkit.scheduler.blocks.block_pool import BlockPool
from toolkit.scheduler.request import NO_SLOT, Anchor, Request


class StateSlots:
    """Gives a slot to each running request, and anchors to leaders while there is room."""

    def __init__(self, count: int, block_size: int, pool: BlockPool) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._block_size, self._pool = block_size, pool
        self._anchors: dict[str, Request] = {}
        """Leaders with an anchor, by id."""
        self._step = 0  # that is planned
        self._being_read: list[int] = []
        """Slots of dropped anchors that a request of this step reads."""

    def begin_step(self, number: int) -> None:
        """Begin a step. Slots that requests of the one before read are free again."""
        self._step = number
        self._free += self._being_read
        self._being_read = []

    # ---- leaders and their siblings

    def add(self, request: Request) -> None:
        """Count a sibling that waits for its leader."""
        if request.leader is not None:
            request.leader.num_followers += 1

    def boundary(self, request: Request) -> int:
        """Return the number of tokens where a leader's step has to end; 0: there is no such."""
        if not request.num_followers:
            return 0
        return (request.num_prompt_tokens - 1) // self._block_size * self._block_size

    def is_ready(self, request: Request) -> bool:
        """Return False if the state that the request begins with is still to come."""
        leader = request.leader
        if leader is None or leader.is_finished:
            return True
        if leader.wants_prompt_logprobs:  # they are reported before the siblings begin
            return False
        if leader.anchor is not None:
            return True
        return leader.num_computed_tokens > self.boundary(leader) or not self.boundary(leader)

    def anchor_of(self, request: Request) -> Anchor | None:
        """Return the anchor that a waiting request begins with."""
        leader = request.leader
        if leader is None or request.wants_prompt_logprobs:
            return None
        return leader.anchor

    def unfollow(self, request: Request) -> None:
        """Stop counting a sibling, which has begun or ended. The last one drops the anchor."""
        leader, request.leader = request.leader, None
        if leader is not None:
            leader.num_followers -= 1
            if not leader.num_followers:
                self._drop(leader)

    # ---- slots

    def enter(self, request: Request) -> int | None:
        """Give a slot to a request that begins. Return the slot that its first step reads.

        None: there is none before the next step."""
        anchor, leader = self.anchor_of(request), request.leader
        if self._free or (anchor is None and self.drop_anchors()):
            request.state_slot = read = self._free.pop()
            if anchor is not None:
                anchor.last_read, read = self._step, anchor.slot
        elif anchor is not None and anchor.last_read < self._step:  # it takes the anchor's over
            assert leader is not None
            request.state_slot = read = anchor.slot
            anchor.slot = NO_SLOT
            self._drop(leader)
        else:
            return None
        self.unfollow(request)
        return read

    def leave(self, request: Request) -> None:
        """Take the slot from a request."""
        self._free.append(request.state_slot)
        request.state_slot = NO_SLOT

    def go_on(self, request: Request) -> int:
        """Return the slot that a request's next tokens read. `state_slot` is the one they write.

        The state at a leader's boundary is kept if there is a free slot."""
        read = request.state_slot
        boundary = self.boundary(request)
        is_there = boundary and request.num_computed_tokens == boundary
        if is_there and request.anchor is None and self._free:
            blocks = request.blocks[: boundary // self._block_size]
            self._pool.share(blocks)
            request.anchor = Anchor(read, blocks, self._step)
            self._anchors[request.id] = request
            request.state_slot = self._free.pop()
        return read

    def drop_anchors(self) -> bool:
        """Drop anchors that no request of this step reads. Return True if there were any.

        Siblings that have not begun compute their prompt."""
        anchors = [(one, one.anchor) for one in self._anchors.values()]
        leaders = [one for one, anchor in anchors if anchor and anchor.last_read < self._step]
        for leader in leaders:
            self._drop(leader)
        return bool(leaders)

    def clear(self) -> None:
        """Drop all anchors: what was written is unknown."""
        for leader in list(self._anchors.values()):
            self._drop(leader)

    def _drop(self, leader: Request) -> None:
        anchor, leader.anchor = leader.anchor, None
        if anchor is not None:
            del self._anchors[leader.id]
            self._pool.release(anchor.blocks)
            if anchor.slot != NO_SLOT:
                (self._being_read if anchor.last_read == self._step else self._free).append(
                    anchor.slot
                )

    @property
    def anchored_blocks(self) -> list[list[int]]:
        """Blocks that anchors hold, next to those of requests."""
        return [one.anchor.blocks for one in self._anchors.values() if one.anchor is not None]

    def problem(self, running: list[Request]) -> str | None:
        """Return what is wrong if these requests run, and no others; None: nothing."""
        anchors = [one.anchor.slot for one in self._anchors.values() if one.anchor is not None]
        held = (request.state_slot for request in running)
        slots = sorted((*self._free, *self._being_read, *anchors, *held))
        is_right = slots == list(range(len(slots)))
        return None if is_right else f"state slots are free or held: {slots}"
