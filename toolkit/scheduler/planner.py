"""Plan the next step: which requests compute how many tokens, in which blocks."""

import numpy as np
import numpy.typing as npt

from toolkit.scheduler.blocks.block_tables import BlockTables, Cached
from toolkit.scheduler.needs import Needs, uncut
from toolkit.scheduler.output import IntArray, NewRow, SchedulerOutput
from toolkit.scheduler.queue import RequestQueue, Suspects
from toolkit.scheduler.request import NO_SLOT, Request, RequestStatus
from toolkit.scheduler.rows import Rows
from toolkit.scheduler.running import RunningRequests
from toolkit.scheduler.speculation import StepCosts
from toolkit.scheduler.states import Snapshot, StateSlots
from toolkit.scheduler.stats import StatsRecorder
from toolkit.scheduler.step import (
    Allotment,
    BatchPart,
    BoolArray,
    RowArray,
    RunningBatch,
    StepBuilder,
    StepInFlight,
    StepLimits,
)


class Planner:
    """Plans steps: running requests first, then waiting ones, under one token budget.

    With a pipeline of `num_stages`, as many steps are in flight, and no request samples in two of
    them: it is scheduled again once its token has come back, and the token travels with the step.
    A step takes no more than its share of the requests that decode, and of new ones, so that every
    stage has a step. Chunks of a prompt follow each other without waiting."""

    def __init__(
        self,
        limits: StepLimits,
        costs: StepCosts,
        *,
        queue: RequestQueue,
        running: RunningRequests,
        suspects: Suspects,
        rows: Rows,
        blocks: BlockTables,
        needs: Needs,
        states: StateSlots | None,
        stats: StatsRecorder,
    ) -> None:
        self.in_flight: dict[int, StepInFlight] = {}
        """Steps by number. The owner removes those that have ended."""
        self._limits = limits
        self._costs = costs
        self._queue = queue
        self._running = running
        self._suspects = suspects
        self._rows = rows
        self._blocks = blocks
        self._needs = needs
        self._states = states
        self._stats = stats
        self._num_steps = 0

    def plan(self) -> SchedulerOutput | None:
        """Return the next step, or None if all wait for the tokens of steps in flight."""
        self._needs.begin_step(self._num_steps)
        for request in self._needs.take_waiting():
            self._queue.push(request)
        if self._states is not None:
            self._states.begin_step(self._num_steps)
        limits = self._limits
        step = StepBuilder(budget=limits.max_num_batched_tokens)
        if limits.num_stages > 1:
            coming = min(len(self._running) + len(self._queue), limits.max_num_seqs)
            step.most_requests = -(-coming // limits.num_stages)
        if self._running.requests:
            allotted = self._allot(step)
            if not self.schedule_batch(step, allotted):
                self.schedule_one_by_one(step, allotted)
        if not step.preempted:
            self._schedule_waiting(step)
        if not (step.num_requests or step.swap_out or step.loads):
            return None
        return self._close(step)

    # ---- running requests

    def _allot(self, step: StepBuilder) -> Allotment:
        """Return what running requests compute: those that decode first, then prompts by rank."""
        batch, rows, limits = self._running.batch, self._rows, self._limits
        budget = step.budget
        where = batch.rows
        computed, tokens = rows.computed.take(where), rows.tokens.take(where)
        wanted = tokens - computed
        wanted *= tokens < rows.limit.take(where)  # none when its last token is in flight
        if self._suspects.current is not None:
            wanted *= np.array([one is self._suspects.current for one in batch.requests])
        if limits.num_stages > 1:
            wanted *= rows.in_flight.take(where) == 0
            decoding = np.flatnonzero(wanted == 1)
            wanted[decoding[self._stage_share(len(decoding)) :]] = 0
        decodes = wanted == 1
        in_prompt: list[int] = []
        if batch.has_features:
            in_prompt = np.flatnonzero(
                (wanted > 0) & (computed < rows.prompts.take(where))
            ).tolist()
            for index in in_prompt:
                start, count = int(computed[index]), int(wanted[index])
                wanted[index] = self._needs.reach(batch.requests[index], start, count, step.loads)
            decodes &= wanted == 1
        all_decode = np.count_nonzero(decodes) == len(decodes)
        if self._states is not None:
            left = rows.boundary.take(where) - computed
            wanted = np.where((left > 0) & (left < wanted), left, wanted)
        num_drafts = None
        if limits.most_drafts > 0 and np.count_nonzero(rows.drafts.take(where)) > 0:
            num_drafts = self._num_drafts(where, wanted, limits.most_drafts)
        num_tokens = wanted if num_drafts is None else wanted + num_drafts
        total = int(np.add.reduce(num_tokens))
        if total > budget:
            all_decode = False
            first = _first_of(num_tokens * decodes, budget)
            left = budget - int(np.add.reduce(first))
            num_tokens = first + _first_of(num_tokens * ~decodes, left)
            for index in in_prompt:
                start, count = int(computed[index]), int(num_tokens[index])
                num_tokens[index] = uncut(batch.requests[index], start, count)
            if num_drafts is not None:
                num_drafts = np.clip(num_tokens - wanted, 0, num_drafts).astype(np.int32)
        return Allotment(
            batch, computed, tokens, num_tokens, num_drafts, decodes, all_decode, total
        )

    def schedule_batch(self, step: StepBuilder, allotted: Allotment) -> bool:
        """Give all running requests their tokens and blocks at once.

        Return False, with nothing changed, if there are too few blocks. The result is that of
        `schedule_one_by_one`, in NumPy for requests that decode; Python runs only for those that
        need a block or compute a prompt. Blocks that decoding fills are registered when they are
        released: no request looks for them sooner."""
        batch, rows = allotted.batch, self._rows
        end = allotted.computed + allotted.num_tokens
        grows = end > rows.capacity.take(batch.rows)
        if np.count_nonzero(grows) and not self._grow_batch(batch, grows, end, step):
            return False
        self._take_decoding(step, allotted, end)
        if not allotted.all_decode:
            is_prompt = (allotted.num_tokens > 0) & ~allotted.decodes
            for index in np.flatnonzero(is_prompt).tolist():
                self._take(batch.requests[index], int(allotted.num_tokens[index]), step)
        return True

    def _take_decoding(self, step: StepBuilder, allotted: Allotment, end: IntArray) -> None:
        """Put all requests that decode into the step. `end`: [n], their numbers of tokens."""
        batch, rows, tokens = allotted.batch, self._rows, allotted.tokens
        part = BatchPart(
            batch.requests,
            batch.rows,
            batch.rows_int32,
            allotted.num_tokens,
            allotted.computed,
            allotted.decodes,  # they sample
            allotted.num_drafts,
        )
        total = allotted.total
        if not allotted.all_decode:
            which = np.flatnonzero((allotted.num_tokens > 0) & allotted.decodes)
            part, end, tokens = part.only(which), end[which], tokens[which]
            total = int(np.add.reduce(part.num_tokens))
        where = part.rows
        num_sampled = 1 if part.num_drafts is None else 1 + part.num_drafts
        if self._states is not None:
            self._keep_states(part, end, step)
        rows.computed[where], rows.tokens[where], rows.in_flight[where] = (
            end,
            tokens + num_sampled,
            rows.in_flight.take(where) + num_sampled,
        )
        step.budget -= total
        step.together = part
        if batch.wants_prompt_logprobs:
            step.prompt_logprobs += part.wanting_prompt_logprobs()
        in_prompt = part.num_computed < rows.prompts.take(where)
        if np.count_nonzero(in_prompt):  # the last token of a prompt
            for index in np.flatnonzero(in_prompt).tolist():
                request = part.requests[index]
                self._blocks.register(request)
                if request.spec.features:
                    self._needs.read(request, int(part.num_computed[index]), 1)

    def _grow_batch(
        self, batch: RunningBatch, grows: BoolArray, end: IntArray, step: StepBuilder
    ) -> bool:
        """Give blocks to requests that grow to `end` tokens. Return False if there are too few."""
        which = np.flatnonzero(grows)
        rows = batch.rows.take(which)
        growing = [batch.requests[index] for index in which.tolist()]
        positions = self._rows.first_uncomputed(rows) if self._blocks.frees else []
        ends = end.take(which).tolist()
        capacities = self._blocks.grow(growing, positions, ends, step.new_blocks)
        if capacities is None:
            return False
        self._flush(growing, self._rows.grow(rows, capacities))
        return True

    def schedule_one_by_one(self, step: StepBuilder, allotted: Allotment) -> None:
        """Schedule requests that have to preempt each other.

        Blocks are given by rank, so that a request is preempted before it is in the step."""
        num_tokens, num_drafts = allotted.num_tokens.tolist(), allotted.num_drafts
        drafts = [0] * len(num_tokens) if num_drafts is None else num_drafts.tolist()
        ready: list[tuple[bool, Request, int, int]] = []
        for request, count, extra, decodes in zip(
            allotted.batch.requests, num_tokens, drafts, allotted.decodes.tolist(), strict=True
        ):
            is_running = request.row >= 0  # not preempted meanwhile
            if is_running and count > 0 and self._make_room(request, count - extra, step):
                ready.append((not decodes, request, count - extra, extra))
        for _, request, count, extra in sorted(ready, key=lambda one: one[0]):
            self._take(request, count + self._room_for_drafts(request, count, extra, step), step)

    def _stage_share(self, ready: int) -> int:
        """Return how many requests that are ready to decode go into the next stage's step."""
        num_stages = self._limits.num_stages
        free = max(1, num_stages - len(self.in_flight))
        return min(-(-len(self._running) // num_stages), -(-ready // free))

    def _make_room(self, request: Request, num_tokens: int, step: StepBuilder) -> bool:
        """Give the request blocks for its next tokens, preempting from the highest rank down.

        Return False if the request itself was preempted."""
        blocks, computed = self._blocks, request.num_computed_tokens
        for_followers = request.num_followers > 0
        while True:
            capacities = blocks.grow(
                [request],
                [request.first_uncomputed],
                [computed + num_tokens],
                step.new_blocks,
                for_followers=for_followers,
            )
            if capacities is not None:
                self._flush([request], self._rows.grow(np.array([request.row]), capacities))
                return True
            if for_followers:
                for_followers = False  # its siblings begin with less than they could
                continue
            victim = self._running.requests[-1]
            self._running.preempt(victim, step)
            step.preempted = True
            if victim is request:
                return False

    def _num_drafts(self, rows: RowArray, num_tokens: IntArray, most: int) -> IntArray:
        """Return how many drafts to add to the tokens of these rows [n], `most` in all."""
        table = self._rows
        offered = table.more_drafts(rows, num_tokens)
        drafts = self._costs.useful(offered, table.rates.of(rows), int(num_tokens.sum()))
        if drafts.sum() > most:
            drafts = np.clip(most - (drafts.cumsum() - drafts), 0, drafts).astype(np.int32)
        return drafts

    def _pays_to_draft(self, rows: RowArray) -> bool:
        """Return whether drafts for these rows' next tokens make the next step faster."""
        return self._costs.pays_to_draft(
            self._rows.most_drafts.take(rows), self._rows.rates.of(rows)
        )

    def _room_for_drafts(
        self, request: Request, num_tokens: int, drafts: int, step: StepBuilder
    ) -> int:
        """Return how many of the drafts get blocks that are free: they preempt no request."""
        end, blocks = request.num_computed_tokens + num_tokens, self._blocks
        while drafts and sum(blocks.missing(request, end + drafts)) > blocks.pool.num_free:
            drafts -= 1
        return drafts if self._make_room(request, num_tokens + drafts, step) else 0

    @staticmethod
    def _flush(requests: list[Request], fill_up: BoolArray) -> None:
        """Have the requests whose tails fill up keep their tokens themselves."""
        for index in np.flatnonzero(fill_up).tolist():
            requests[index].flush_tail()

    # ---- waiting requests

    def _schedule_waiting(self, step: StepBuilder) -> None:
        set_aside, running = [], self._running.requests
        is_encoding = False  # a request waits for its feature: others with features do, too
        while (
            self._queue
            and step.budget > 0
            and len(running) < self._limits.max_num_seqs
            and step.num_requests < step.most_requests
            and (request := self._queue.first()) is not None
        ):
            if not self._is_ready(request) or (is_encoding and request.spec.features):
                set_aside.append(request)
            elif self._needs.can_begin(request):
                admitted = self._admit(request, step)
                if admitted is None:
                    # A front end that hangs sends no bytes: requests of others go on.
                    comes = not self._blocks.has_features or self._needs.has_all_bytes(request)
                    is_encoding = is_encoding or comes
                    set_aside.append(request)
                elif not admitted:
                    break
            self._queue.pop()
        for request in set_aside:
            self._queue.push(request)

    def _is_ready(self, request: Request) -> bool:
        if request.num_in_flight:
            return False
        suspect = self._suspects.current
        if suspect is not None:
            return request is suspect
        leader = request.leader
        if self._states is not None:
            return self._states.is_ready(request)
        if leader is None or leader.is_finished:
            return True
        if leader.wants_prompt_logprobs:  # they are reported before the siblings begin
            return False
        grain = self._blocks.grain
        shared = (leader.num_prompt_tokens - 1) // grain * grain
        return leader.num_computed_tokens >= shared

    def _admit(self, request: Request, step: StepBuilder) -> bool | None:
        """Give a waiting request a row and blocks for its first tokens.

        Return False, with nothing changed, if there are too few blocks; None if it begins with a
        feature that is not computed yet."""
        is_swapped = request.status is RequestStatus.SWAPPED
        blocks = self._blocks
        cached = blocks.nothing(request) if is_swapped else blocks.find_cached(request)
        snapshot = None
        if self._states is not None and not is_swapped:
            snapshot, cached = self._states.begin_with(request, cached)
        num_computed = request.num_computed_tokens if is_swapped else cached.length
        num_tokens = request.num_tokens - num_computed
        if request.branch > num_computed:
            num_tokens = request.branch - num_computed
        if num_tokens > step.budget:
            if self._limits.chunks_prompts:
                num_tokens = step.budget
            elif step.num_requests:
                return False
        if request.spec.features:
            if not uncut(request, num_computed, num_tokens):
                return False
            num_tokens = self._needs.reach(request, num_computed, num_tokens, step.loads)
            if not num_tokens:
                return None
        is_encoded = blocks.lacks_feature(cached)
        if is_encoded and not self._needs.can_encode(request, blocks.feature_tokens):
            return None
        read = self._begin(request, cached, num_computed, num_tokens, snapshot)
        if read is None:
            return False
        if blocks.has_features:
            self._needs.begin_with_feature(request, is_new=is_encoded)
        if is_encoded:
            pages = blocks.feature_pages(request)
            self._needs.encode(request, blocks.feature_tokens, pages, step.loads)
        if is_swapped:
            step.swap_in += self._blocks.swap_in(request)
            if self._states is not None:
                step.state_swap_in.append(self._states.swap_in(request))
        elif request.status is RequestStatus.WAITING:
            request.num_cached_tokens = num_computed
            self._stats.current.prefix_cache_queries += request.num_prompt_tokens
            self._stats.current.prefix_cache_hits += num_computed
        request.num_computed_tokens = num_computed
        step.new_rows.append(self._new_row(request, step))
        if read != request.state_slot:
            step.state_reads[request.row] = read
        self._take(request, num_tokens, step)
        return True

    def _begin(
        self,
        request: Request,
        cached: Cached,
        num_computed: int,
        num_tokens: int,
        snapshot: Snapshot | None,
    ) -> int | None:
        """Give a request its first blocks, and a state slot. Return the slot that it reads first.

        None, with nothing changed: there are too few."""
        if not self._blocks.begin(request, cached, num_computed, num_computed + num_tokens):
            return None
        read: int | None = NO_SLOT
        if self._states is not None:
            read = self._states.enter(request, snapshot)
        if read is None:
            self._blocks.release(request)
        else:
            request.unfollow()
        return read

    def _keep_states(self, part: BatchPart, end: IntArray, step: StepBuilder) -> None:
        """Have the step keep snapshots of requests that decode, if any are wanted.

        `end`: [n], their numbers of tokens, with drafts."""
        states, where = self._states, part.rows
        assert states is not None
        most = end if part.num_drafts is None else end - part.num_drafts
        wants = most // states.grain * states.grain > self._rows.stated.take(where)
        if states.unpassed:
            wants |= np.isin(where, [request.row for request in states.unpassed])
        for index in np.flatnonzero(wants).tolist():
            self._keep_state(part.requests[index], int(most[index]), step)
        self._rows.stated[where] = np.maximum(self._rows.stated.take(where), most)

    def _keep_state(self, request: Request, end: int, step: StepBuilder) -> None:
        """Have the step keep a snapshot of a request's state, if one is wanted.

        `end`: most tokens that its state has after the step."""
        if self._states is not None:
            stated = self._rows.stated.item(request.row)
            kept = self._states.keep(request, stated, end)
            if kept is not None:
                step.state_keeps[request.row] = kept
            self._rows.stated[request.row] = max(stated, end)

    def _new_row(self, request: Request, step: StepBuilder) -> NewRow:
        """Make a request run, and return its initial state."""
        slot = self._needs.begin(request, step.loads)
        self._running.admit(request, self._num_steps)
        return NewRow(
            row=request.row,
            spec=request.spec,
            seed=request.seed,
            output_token_ids=list(request.output_token_ids),
            num_computed_tokens=request.num_computed_tokens,
            blocks=[list(table) for table in request.blocks],
            adapter=slot,
        )

    # ---- the step itself

    def _take(self, request: Request, num_tokens: int, step: StepBuilder) -> None:
        """Put `num_tokens` of a request into the step."""
        behind = request.num_tokens_to_compute
        samples, num_drafts = behind <= num_tokens, max(0, num_tokens - behind)
        self._keep_state(request, request.num_computed_tokens + num_tokens - num_drafts, step)
        step.add(request, num_tokens, samples, num_drafts)
        if request.spec.features:
            self._needs.read(request, request.num_computed_tokens, num_tokens)
        request.schedule(num_tokens, samples + num_drafts)
        self._blocks.register(request)

    def _close(self, step: StepBuilder) -> SchedulerOutput:
        part, rows = step.joined(), self._rows
        output = SchedulerOutput(
            step=self._num_steps,
            rows=part.rows_int32,
            num_tokens=part.num_tokens,
            num_computed=part.num_computed,
            samples=part.samples,
            num_drafts=_NONE if part.num_drafts is None else part.num_drafts,
            new_rows=step.new_rows,
            swap_out=step.swap_out,
            swap_in=step.swap_in,
            state_swap_out=step.state_swap_out,
            state_swap_in=step.state_swap_in,
            loads=step.loads,
            prompt_logprobs=step.prompt_logprobs,
        )
        if step.new_blocks:
            output.new_blocks = np.array(step.new_blocks, np.int32).reshape(-1, 3)
        if self._states is not None:
            output.state_writes = rows.state_slots.take(part.rows)
            output.state_reads = output.state_writes.copy()
            output.state_keeps = np.full((len(part.rows), 2), NO_SLOT, np.int32)
            for row, slot in step.state_reads.items():
                output.state_reads[part.rows == row] = slot
            for row, kept in step.state_keeps.items():
                output.state_keeps[part.rows == row] = kept
        if self._limits.most_drafts:
            output.drafts = self._pays_to_draft(part.rows[part.samples])
            rows.has_drafted[part.rows] = output.drafts
        if self._limits.num_stages > 1:
            output.known_tokens = rows.known_tokens(part.rows[part.samples], output.num_sampled - 1)
        if np.count_nonzero(rows.constrained):
            output.constrained = np.flatnonzero(rows.constrained.take(part.rows) & part.samples)
        self._num_steps += 1
        admitted = part.requests[len(part.requests) - len(step.new_rows) :]
        self.in_flight[output.step] = StepInFlight(
            part.requests, part.rows, admitted, rows.num_released, self._needs.loading
        )
        return output


def _first_of(counts: npt.NDArray[np.signedinteger], most: int) -> IntArray:
    """Return the counts [n], cut so that they add up to `most` at most."""
    cut: IntArray = np.clip(most - (counts.cumsum() - counts), 0, counts).astype(np.int32)
    return cut


_NONE = np.empty(0, np.int32)
