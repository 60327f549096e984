"""What the next step is: which requests compute how many tokens, in which blocks."""

from __future__ import annotations

import bisect
import heapq

import numpy as np

from toolkit.scheduler.live_requests import LiveRequests
from toolkit.scheduler.output import IntArray, NewRow, SchedulerOutput
from toolkit.scheduler.request import Request, RequestStatus
from toolkit.scheduler.step import BoolArray, InFlight, Lineup, Step, Together


class Planner(LiveRequests):
    """Makes steps: running requests first, then those that wait, under one token budget.

    With several stages in a row (`num_stages`), as many steps are in flight, and no request samples in two of them: it is scheduled
    again when its token has come back, which then travels with the step. So that there is a step for each stage, a step takes no
    more than its share of the requests that decode, and of those that come. Parts of a prompt follow each other without waiting.
    """

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None when nothing can run before an earlier step's tokens are known."""
        step = Step(budget=self.max_num_batched_tokens)
        if self.num_stages > 1:
            coming = min(len(self.running) + len(self._waiting), self.max_num_seqs)
            step.most_requests = -(-coming // self.num_stages)
        if self._suspects or not self._schedule_together(step):
            self._schedule_one_by_one(step)
        if not step.preempted:
            self._schedule_waiting(step)
        if not step.num_requests and not step.swap_out:
            return None
        return self._close(step)

    def first_scheduled(self, output: SchedulerOutput) -> list[Request]:
        """Requests that this step, the latest, runs for the first time."""
        return [r for r in self._in_flight[output.step].admitted if not r.num_preemptions]

    def constrained(self, output: SchedulerOutput) -> list[Request]:
        """The requests of a step in flight whose next token is bound to a grammar."""
        requests = self._in_flight[output.step].requests
        return [requests[index] for index in output.constrained.tolist()]

    # ---- those that run

    def _schedule_together(self, step: Step) -> bool:
        """Gives the running requests their tokens and blocks; False, and nothing changed, when blocks lack.

        The same as one by one, in NumPy: Python is only for those that need a block or compute a prompt.
        Blocks that decoding fills are not made findable here but when they are given up: nobody asks for them
        sooner.
        """
        lineup, rows = self._current_lineup(), self._rows
        if not lineup.requests:
            return True
        where = lineup.rows
        computed, tokens = rows.computed.take(where), rows.tokens.take(where)
        in_flight = rows.in_flight.take(where)
        num_tokens = tokens - computed
        num_tokens *= tokens < rows.limit.take(where)  # none when its last token is in flight
        if self.num_stages > 1:
            num_tokens *= in_flight == 0
            decoding = np.flatnonzero(num_tokens == 1)
            num_tokens[decoding[self._share_of(len(decoding)) :]] = 0
        total = int(np.add.reduce(num_tokens))
        if total > step.budget:
            before = num_tokens.cumsum() - num_tokens
            num_tokens = np.clip(step.budget - before, 0, num_tokens).astype(np.int32)
            total = step.budget
        end = computed + num_tokens
        grows = end > rows.capacity.take(where)
        if np.count_nonzero(grows) and not self._grow_together(lineup, grows, end, step):
            return False
        samples = end == tokens
        rows.computed[where], rows.tokens[where], rows.in_flight[where] = (
            end,
            tokens + samples,
            in_flight + samples,
        )
        part = Together(lineup.requests, where, lineup.rows_int32, num_tokens, computed, samples)
        if np.count_nonzero(num_tokens) < len(num_tokens):
            part = part.without_idle()
        step.budget -= total
        step.together = part
        if lineup.wants_prompt_logprobs:
            step.prompt_logprobs += part.wanting_prompt_logprobs()
        in_prompt = computed < rows.prompts.take(where)
        if np.count_nonzero(in_prompt):
            for index in np.flatnonzero(in_prompt).tolist():
                self._remember(lineup.requests[index])
        return True

    def _grow_together(self, lineup: Lineup, grows: BoolArray, end: IntArray, step: Step) -> bool:
        """Gives blocks to those that grow to `end` tokens; False, and nothing changed, when there are too few."""
        which = np.flatnonzero(grows)
        rows = lineup.rows.take(which)
        capacity = self._rows.capacity.take(rows)
        counts = -(-(end.take(which) - capacity) // self.block_size)
        blocks = self.pool.allocate(int(counts.sum()))
        if blocks is None:
            return False
        self._rows.capacity[rows] = capacity + counts * self.block_size
        at = 0
        for index, row, count in zip(which.tolist(), rows.tolist(), counts.tolist(), strict=True):
            self._grow(lineup.requests[index], row, blocks[at : at + count], step)
            at += count
        return True

    def _current_lineup(self) -> Lineup:
        if self._lineup is None:
            rows = np.array([request.row for request in self.running], np.intp)
            wants = any(request.params.prompt_logprobs is not None for request in self.running)
            self._lineup = Lineup(list(self.running), rows, rows.astype(np.int32), wants)
        return self._lineup

    def _schedule_one_by_one(self, step: Step) -> None:
        """The same where requests may have to make room for each other, or only one may run."""
        index = num_decoding = 0
        most = len(self.running)
        if self.num_stages > 1:
            most = self._share_of(sum(self._num_wanted(request) == 1 for request in self.running))
        while index < len(self.running) and step.budget > 0:
            request = self.running[index]
            wanted = self._num_wanted(request)
            num_decoding += wanted == 1
            num_tokens = 0 if wanted == 1 and num_decoding > most else min(wanted, step.budget)
            if num_tokens > 0 and self._make_room(request, num_tokens, step):
                self._take(request, num_tokens, step)
            index += 1

    def _share_of(self, ready: int) -> int:
        """How many of the requests that are ready to decode go into the next of the steps for all stages."""
        free = max(1, self.num_stages - len(self._in_flight))
        return min(-(-len(self.running) // self.num_stages), -(-ready // free))

    def _make_room(self, request: Request, num_tokens: int, step: Step) -> bool:
        """Gives the request blocks for its next tokens, preempting from the lowest rank up; False when it
        went itself.
        """
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

    def _grow(self, request: Request, row: int, blocks: list[int], step: Step) -> None:
        held = request.blocks
        for block in blocks:
            step.new_blocks += (row, len(held), block)
            held.append(block)
        if len(held) % self._rows.settle_every == 0:
            request.settle()

    def _num_wanted(self, request: Request) -> int:
        """Tokens the request would compute now; none when its last token is in flight, or another is being
        tried alone.
        """
        if self._suspects and request is not self._suspects[0]:
            return 0
        if self.num_stages > 1 and request.num_in_flight:
            return 0
        if request.num_tokens >= request.length_limit(self.max_model_len):
            return 0
        return request.num_tokens_to_compute

    # ---- those that wait

    def _schedule_waiting(self, step: Step) -> None:
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
        if leader.wants_prompt_logprobs:  # which come before anything of its siblings
            return False
        return (
            leader.num_computed_tokens
            >= (leader.num_prompt_tokens - 1) // self.block_size * self.block_size
        )

    def _admit(self, request: Request, step: Step) -> bool:
        """Gives a waiting request a row and blocks for its first tokens; False, and nothing changed, when
        blocks lack.
        """
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
        request.num_remembered_blocks = len(cached)
        request.status = RequestStatus.RUNNING
        self._rows.place(request, self._free_rows.pop(), self._num_steps, self.max_model_len)
        self._lineup = None
        step.new_rows.append(
            NewRow(
                row=request.row,
                spec=request.spec,
                seed=request.seed,
                output_token_ids=list(request.output_token_ids),
                num_computed_tokens=num_computed,
                blocks=list(request.blocks),
            )
        )
        bisect.insort(self.running, request, key=self._rank)
        self._take(request, num_tokens, step)
        return True

    def _find_cached(self, request: Request) -> list[int]:
        """Blocks that hold the beginning of the request's tokens; at least one token is left to compute."""
        if not request.cacheable or request.wants_prompt_logprobs:
            return []
        most = (request.num_tokens - 1) // self.block_size
        return self.pool.find(request.hashes(most, self.block_size)[:most])

    # ---- the step itself

    def _take(self, request: Request, num_tokens: int, step: Step) -> None:
        """Puts `num_tokens` of a request into the step."""
        if (
            request.wants_prompt_logprobs
            and request.num_computed_tokens < request.num_prompt_tokens - 1
        ):
            step.prompt_logprobs.append(step.num_requests)
        step.requests.append(request)
        step.num_tokens.append(num_tokens)
        step.num_computed.append(request.num_computed_tokens)
        step.budget -= num_tokens
        samples = request.num_tokens_to_compute == num_tokens
        step.samples.append(samples)
        request.schedule(num_tokens, samples=samples)
        self._remember(request)

    def _close(self, step: Step) -> SchedulerOutput:
        part = self._joined(step)
        output = SchedulerOutput(
            step=self._num_steps,
            rows=part.rows_int32,
            num_tokens=part.num_tokens,
            num_computed=part.num_computed,
            samples=part.samples,
            new_rows=step.new_rows,
            new_blocks=np.array(step.new_blocks, np.int32).reshape(-1, 3),
            swap_out=step.swap_out,
            swap_in=step.swap_in,
            prompt_logprobs=step.prompt_logprobs,
        )
        if self.num_stages > 1:
            ends = (part.num_computed + part.num_tokens)[part.samples]
            output.last_tokens = self._rows.newest(part.rows[part.samples], ends)
        if self._rows.constrained.any():
            output.constrained = np.flatnonzero(
                self._rows.constrained.take(part.rows) & part.samples
            )
        self._num_steps += 1
        admitted = part.requests[len(part.requests) - len(step.new_rows) :]
        self._in_flight[output.step] = InFlight(
            part.requests, part.rows, admitted, self._num_rows_left
        )
        return output

    def _joined(self, step: Step) -> Together:
        """Both parts of a step."""
        if step.together is not None and not step.requests:
            return step.together
        rows = np.array([request.row for request in step.requests], np.intp)
        part = Together(
            step.requests,
            rows,
            rows.astype(np.int32),
            np.array(step.num_tokens, np.int32),
            np.array(step.num_computed, np.int32),
            np.array(step.samples, np.bool_),
        )
        if step.together is None:
            return part
        first = step.together
        return Together(
            first.requests + part.requests,
            np.concatenate((first.rows, part.rows)),
            np.concatenate((first.rows_int32, part.rows_int32)),
            np.concatenate((first.num_tokens, part.num_tokens)),
            np.concatenate((first.num_computed, part.num_computed)),
            np.concatenate((first.samples, part.samples)),
        )
