"""Plan the next step: which requests compute how many tokens, in which blocks."""

import bisect
import heapq

import numpy as np

from toolkit.scheduler.live_requests import LiveRequests
from toolkit.scheduler.output import IntArray, NewRow, SchedulerOutput
from toolkit.scheduler.request import Request, RequestStatus
from toolkit.scheduler.rows import NO_TOKEN
from toolkit.scheduler.step import (
    BatchPart,
    BoolArray,
    RowArray,
    RunningBatch,
    StepBuilder,
    StepInFlight,
)


class Planner(LiveRequests):
    """Plans steps: running requests first, then waiting ones, under one token budget.

    With a pipeline of `num_stages`, as many steps are in flight, and no request samples in two of
    them: it is scheduled again once its token has come back, and the token travels with the step.
    A step takes no more than its share of the requests that decode, and of new ones, so that every
    stage has a step. Chunks of a prompt follow each other without waiting."""

    def schedule(self) -> SchedulerOutput | None:
        """Return the next step, or None if all wait for the tokens of steps in flight."""
        for request in self.adapters.take_waiting():
            self.enqueue(request)
        step = StepBuilder(budget=self.max_num_batched_tokens)
        if self.num_stages > 1:
            coming = min(len(self.running) + len(self._waiting), self.max_num_seqs)
            step.most_requests = -(-coming // self.num_stages)
        if self._suspects or not self._schedule_batch(step):
            self._schedule_one_by_one(step)
        if not step.preempted:
            self._schedule_waiting(step)
        if not step.num_requests and not step.swap_out:
            return None
        return self._close(step)

    def first_scheduled(self, output: SchedulerOutput) -> list[Request]:
        """Return the requests that this step, the latest, runs for the first time."""
        return [r for r in self._in_flight[output.step].admitted if not r.num_preemptions]

    def constrained(self, output: SchedulerOutput) -> list[tuple[Request, list[int]]]:
        """Return the requests of a step in flight that a grammar constrains, with their drafts."""
        requests, table = self._in_flight[output.step].requests, self._rows
        found = []
        for index in output.constrained.tolist():
            request = requests[index]
            count = output.num_drafts.item(index) if len(output.num_drafts) else 0
            drafts = table.draft_tokens[request.row, :count].tolist()
            found.append((request, drafts if request.row >= 0 else [NO_TOKEN] * count))
        return found

    # ---- running requests

    def _schedule_batch(self, step: StepBuilder) -> bool:
        """Give all running requests their tokens and blocks at once.

        Return False, with nothing changed, if there are too few blocks. The result is that of
        `_schedule_one_by_one`, in NumPy; Python runs only for requests that need a block or compute
        a prompt. Blocks that decoding fills are registered when they are released: no request looks
        for them sooner."""
        batch, rows = self._current_batch(), self._rows
        if not batch.requests:
            return True
        where = batch.rows
        computed, tokens = rows.computed.take(where), rows.tokens.take(where)
        in_flight = rows.in_flight.take(where)
        num_tokens = tokens - computed
        num_tokens *= tokens < rows.limit.take(where)  # none when its last token is in flight
        if self.num_stages > 1:
            num_tokens *= in_flight == 0
            decoding = np.flatnonzero(num_tokens == 1)
            num_tokens[decoding[self._stage_share(len(decoding)) :]] = 0
        has_drafts = self.most_step_drafts > 0 and np.count_nonzero(rows.drafts.take(where)) > 0
        if has_drafts:
            num_tokens += self._num_drafts(where, num_tokens, self.most_step_drafts)
        total = int(np.add.reduce(num_tokens))
        if total > step.budget:
            before = num_tokens.cumsum() - num_tokens
            num_tokens = np.clip(step.budget - before, 0, num_tokens).astype(np.int32)
            total = step.budget
        end = computed + num_tokens
        grows = end > rows.capacity.take(where)
        if np.count_nonzero(grows) and not self._grow_batch(batch, grows, end, step):
            return False
        samples = end >= tokens
        num_drafts = (end - tokens) * samples if has_drafts else None
        num_sampled = samples if num_drafts is None else samples + num_drafts
        rows.computed[where], rows.tokens[where], rows.in_flight[where] = (
            end,
            tokens + num_sampled,
            in_flight + num_sampled,
        )
        part = BatchPart(
            batch.requests, where, batch.rows_int32, num_tokens, computed, samples, num_drafts
        )
        if np.count_nonzero(num_tokens) < len(num_tokens):
            part = part.without_idle()
        step.budget -= total
        step.together = part
        if batch.wants_prompt_logprobs:
            step.prompt_logprobs += part.wanting_prompt_logprobs()
        in_prompt = computed < rows.prompts.take(where)
        if np.count_nonzero(in_prompt):
            for index in np.flatnonzero(in_prompt).tolist():
                self._register_blocks(batch.requests[index])
        return True

    def _grow_batch(
        self, batch: RunningBatch, grows: BoolArray, end: IntArray, step: StepBuilder
    ) -> bool:
        """Give blocks to requests that grow to `end` tokens. Return False if there are too few."""
        which = np.flatnonzero(grows)
        rows = batch.rows.take(which)
        capacity = self._rows.capacity.take(rows)
        counts = -(-(end.take(which) - capacity) // self.block_size)
        blocks = self.pool.allocate(int(counts.sum()))
        if blocks is None:
            return False
        self._rows.capacity[rows] = capacity + counts * self.block_size
        at = 0
        for index, row, count in zip(which.tolist(), rows.tolist(), counts.tolist(), strict=True):
            self._grow(batch.requests[index], row, blocks[at : at + count], step)
            at += count
        return True

    def _current_batch(self) -> RunningBatch:
        if self._batch is None:
            rows = np.array([request.row for request in self.running], np.intp)
            wants = any(request.params.prompt_logprobs is not None for request in self.running)
            self._batch = RunningBatch(list(self.running), rows, rows.astype(np.int32), wants)
        return self._batch

    def _schedule_one_by_one(self, step: StepBuilder) -> None:
        """Schedule requests that may have to preempt each other, or of which only one may run."""
        index = num_decoding = 0
        most = len(self.running)
        if self.num_stages > 1:
            most = self._stage_share(
                sum(self._num_wanted(request) == 1 for request in self.running)
            )
        while index < len(self.running) and step.budget > 0:
            request = self.running[index]
            wanted = self._num_wanted(request)
            num_decoding += wanted == 1
            num_tokens = 0 if wanted == 1 and num_decoding > most else min(wanted, step.budget)
            if num_tokens > 0 and self._make_room(request, num_tokens, step):
                num_tokens += self._add_drafts(request, num_tokens, step)
                self._take(request, num_tokens, step)
            index += 1

    def _stage_share(self, ready: int) -> int:
        """Return how many requests that are ready to decode go into the next stage's step."""
        free = max(1, self.num_stages - len(self._in_flight))
        return min(-(-len(self.running) // self.num_stages), -(-ready // free))

    def _make_room(self, request: Request, num_tokens: int, step: StepBuilder) -> bool:
        """Give the request blocks for its next tokens, preempting from the highest rank down.

        Return False if the request itself was preempted."""
        while True:
            need = self._blocks_for(request.num_computed_tokens + num_tokens) - len(request.blocks)
            blocks = self.pool.allocate(max(0, need))
            if blocks is not None:
                if blocks:
                    self._grow(request, request.row, blocks, step)
                    self._rows.capacity[request.row] += len(blocks) * self.block_size
                return True
            victim = self.running.pop()
            self._preempt(victim, step)
            if victim is request:
                return False

    def _num_drafts(self, rows: RowArray, num_tokens: IntArray, most: int) -> IntArray:
        """Return how many drafts to add to the tokens of these rows [n], `most` in all."""
        table = self._rows
        offered = table.more_drafts(rows, num_tokens)
        drafts = self.step_costs.useful(offered, table.rates.of(rows), int(num_tokens.sum()))
        if drafts.sum() > most:
            drafts = np.clip(most - (drafts.cumsum() - drafts), 0, drafts).astype(np.int32)
        return drafts

    def _pays_to_draft(self, rows: RowArray) -> bool:
        """Return whether a step of these rows' next tokens would verify any of the most drafts."""
        most, rates = self._rows.most_drafts.take(rows), self._rows.rates.of(rows)
        return bool(np.count_nonzero(self.step_costs.useful(most, rates, len(rows))))

    def _add_drafts(self, request: Request, num_tokens: int, step: StepBuilder) -> int:
        """Return how many drafts to add. They get blocks that are free, and preempt no request."""
        row = np.array([request.row])
        most = self.most_step_drafts - sum(step.num_drafts)
        drafts = int(self._num_drafts(row, np.array([num_tokens], np.int32), most)[0])
        drafts = min(drafts, step.budget - num_tokens)
        end = request.num_computed_tokens + num_tokens
        room = (len(request.blocks) + self.pool.num_free) * self.block_size - end
        drafts = min(drafts, room)
        return drafts if self._make_room(request, num_tokens + drafts, step) else 0

    def _grow(self, request: Request, row: int, blocks: list[int], step: StepBuilder) -> None:
        held = request.blocks
        for block in blocks:
            step.new_blocks += (row, len(held), block)
            held.append(block)
        if len(held) % self._rows.flush_every == 0:
            request.flush_tail()

    def _num_wanted(self, request: Request) -> int:
        """Return the tokens that the request would compute now.

        None if its last token is in flight, or if another request is being tried alone."""
        if self._suspects and request is not self._suspects[0]:
            return 0
        if self.num_stages > 1 and request.num_in_flight:
            return 0
        if request.num_tokens >= request.length_limit(self.max_model_len):
            return 0
        return request.num_tokens_to_compute

    # ---- waiting requests

    def _schedule_waiting(self, step: StepBuilder) -> None:
        set_aside = []
        while (
            self._waiting
            and step.budget > 0
            and len(self.running) < self.max_num_seqs
            and step.num_requests < step.most_requests
        ):
            entry = heapq.heappop(self._waiting)
            request = entry[1]
            if request.is_finished:
                continue
            if not self._is_ready(request):
                set_aside.append(entry)
            elif (adapter := request.spec.adapter) and not self.adapters.has_room(adapter.key):
                self.adapters.wait(adapter.key, request)
            elif not self._admit(request, step):
                set_aside.append(entry)
                break
        for entry in set_aside:
            heapq.heappush(self._waiting, entry)

    def _is_ready(self, request: Request) -> bool:
        if request.num_in_flight:
            return False
        if self._suspects:
            return request is self._suspects[0]
        leader = request.leader
        if leader is None or leader.is_finished:
            return True
        if leader.wants_prompt_logprobs:  # they are reported before the siblings begin
            return False
        return (
            leader.num_computed_tokens
            >= (leader.num_prompt_tokens - 1) // self.block_size * self.block_size
        )

    def _admit(self, request: Request, step: StepBuilder) -> bool:
        """Give a waiting request a row and blocks for its first tokens.

        Return False, with nothing changed, if there are too few blocks."""
        if request.status is RequestStatus.SWAPPED:
            cached: list[int] = []
            num_computed = request.num_computed_tokens
        else:
            cached = self._find_cached(request)
            num_computed = len(cached) * self.block_size
        num_tokens = request.num_tokens - num_computed
        if num_tokens > step.budget:
            if self.chunks_prompts:
                num_tokens = step.budget
            elif step.num_requests:
                return False
        need = self._blocks_for(num_computed + num_tokens) - len(cached)
        if need > self.pool.num_free - self.pool.num_free_among(cached):
            return False
        self.pool.share(cached)
        fresh = self.pool.allocate(need)
        assert fresh is not None
        request.blocks = cached + fresh
        if request.status is RequestStatus.SWAPPED:
            step.swap_in.extend(zip(request.host_blocks, request.blocks, strict=False))
            self.host_pool.release(request.host_blocks)
            request.host_blocks = []
        elif request.status is RequestStatus.WAITING:
            request.num_cached_tokens = num_computed
            self._stats.prefix_cache_queries += request.num_prompt_tokens
            self._stats.prefix_cache_hits += num_computed
        request.num_computed_tokens = num_computed
        request.num_registered_blocks = len(cached)
        request.status = RequestStatus.RUNNING
        self._rows.place(request, self._free_rows.pop(), self._num_steps, self.max_model_len)
        self._batch = None
        slot = 0
        if (adapter := request.spec.adapter) is not None:
            entry = self.adapters.enter(adapter.key)
            slot = 1 + entry.number
            if entry.is_new:
                step.adapters.append((slot, adapter.key))
        step.new_rows.append(
            NewRow(
                row=request.row,
                spec=request.spec,
                seed=request.seed,
                output_token_ids=list(request.output_token_ids),
                num_computed_tokens=num_computed,
                blocks=list(request.blocks),
                adapter=slot,
            )
        )
        bisect.insort(self.running, request, key=self._rank)
        self._take(request, num_tokens, step)
        return True

    def _find_cached(self, request: Request) -> list[int]:
        """Return cached blocks of the request's beginning. At least one token remains."""
        if not request.cacheable or request.wants_prompt_logprobs:
            return []
        most = (request.num_tokens - 1) // self.block_size
        return self.pool.find(request.hashes(most, self.block_size)[:most])

    # ---- the step itself

    def _take(self, request: Request, num_tokens: int, step: StepBuilder) -> None:
        """Put `num_tokens` of a request into the step."""
        if (
            request.wants_prompt_logprobs
            and request.num_computed_tokens < request.num_prompt_tokens - 1
        ):
            step.prompt_logprobs.append(step.num_requests)
        step.requests.append(request)
        step.num_tokens.append(num_tokens)
        step.num_computed.append(request.num_computed_tokens)
        step.budget -= num_tokens
        num_drafts = max(0, num_tokens - request.num_tokens_to_compute)
        samples = request.num_tokens_to_compute <= num_tokens
        step.samples.append(samples)
        step.num_drafts.append(num_drafts)
        request.schedule(num_tokens, samples + num_drafts)
        self._register_blocks(request)

    def _close(self, step: StepBuilder) -> SchedulerOutput:
        part = self._join_parts(step)
        output = SchedulerOutput(
            step=self._num_steps,
            rows=part.rows_int32,
            num_tokens=part.num_tokens,
            num_computed=part.num_computed,
            samples=part.samples,
            num_drafts=_NONE if part.num_drafts is None else part.num_drafts,
            new_rows=step.new_rows,
            new_blocks=np.array(step.new_blocks, np.int32).reshape(-1, 3),
            swap_out=step.swap_out,
            swap_in=step.swap_in,
            adapters=step.adapters,
            prompt_logprobs=step.prompt_logprobs,
        )
        if self.most_step_drafts:
            output.drafts = self._pays_to_draft(part.rows[part.samples])
            self._rows.has_drafted[part.rows] = output.drafts
        if self.num_stages > 1:
            output.known_tokens = self._rows.known_tokens(
                part.rows[part.samples], output.num_sampled - 1
            )
        if self._rows.constrained.any():
            output.constrained = np.flatnonzero(
                self._rows.constrained.take(part.rows) & part.samples
            )
        self._num_steps += 1
        admitted = part.requests[len(part.requests) - len(step.new_rows) :]
        self._in_flight[output.step] = StepInFlight(
            part.requests, part.rows, admitted, self._num_rows_released
        )
        return output

    def _join_parts(self, step: StepBuilder) -> BatchPart:
        """Return both parts of a step as one."""
        if step.together is not None and not step.requests:
            return step.together
        rows = np.array([request.row for request in step.requests], np.intp)
        part = BatchPart(
            step.requests,
            rows,
            rows.astype(np.int32),
            np.array(step.num_tokens, np.int32),
            np.array(step.num_computed, np.int32),
            np.array(step.samples, np.bool_),
            np.array(step.num_drafts, np.int32) if any(step.num_drafts) else None,
        )
        if step.together is None:
            return part
        first = step.together
        num_drafts = first.num_drafts
        if num_drafts is not None:
            num_drafts = np.pad(num_drafts, (0, len(rows)))  # the others have just been admitted
        return BatchPart(
            first.requests + part.requests,
            np.concatenate((first.rows, part.rows)),
            np.concatenate((first.rows_int32, part.rows_int32)),
            np.concatenate((first.num_tokens, part.num_tokens)),
            np.concatenate((first.num_computed, part.num_computed)),
            np.concatenate((first.samples, part.samples)),
            num_drafts,
        )


_NONE = np.empty(0, np.int32)
