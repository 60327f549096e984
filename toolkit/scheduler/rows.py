"""Running requests as columns, so that a step costs NumPy calls instead of a loop."""

import numpy as np
import numpy.typing as npt

from toolkit.scheduler.output import IntArray
from toolkit.scheduler.request import ACCEPTED, NUM_COUNTS, REJECTED, Request
from toolkit.scheduler.speculation import IDLE_FADING, AcceptanceRates

NO_STEP = np.iinfo(np.int32).max
NO_TOKEN = -2
LEAST_TAIL = 256


class Rows:
    """Row r belongs to one request from its admission to its end or preemption.

    `counts` [3, num_rows] holds the counts of running requests: `Request` reads and writes its own,
    the scheduler many at once. `tails` [num_rows, width] holds each row's newest tokens, position p
    at p modulo the width; the request copies them before they are overwritten
    (`Request.flush_tail`)."""

    def __init__(
        self,
        num_rows: int,
        block_size: int,
        max_model_len: int,
        most_drafts: int = 0,
        idle_fading: float = IDLE_FADING,
    ) -> None:
        self.max_model_len = max_model_len
        self.free = list(range(num_rows - 1, -1, -1))
        """Rows without a request. The last one is taken next."""
        self.num_released = 0  # times that a request left its row
        self.counts = np.zeros((NUM_COUNTS, num_rows), np.int32)
        self.computed, self.tokens, self.in_flight = self.counts[:3]
        self.prompts = np.zeros(num_rows, np.int32)  # tokens of the prompt
        self.capacity = np.zeros(num_rows, np.int32)  # tokens that the row's blocks hold
        self.state_slots = np.zeros(num_rows, np.int32)  # that the row's steps write
        self.stated = np.zeros(num_rows, np.int32)
        """Most tokens that the state may have that a step has written (`scheduler.states`)."""
        self.boundary = np.zeros(num_rows, np.int32)  # tokens where a step has to end; 0: none
        self.limit = np.zeros(num_rows, np.int32)  # number of tokens with which the request ends
        self.stops_from = np.zeros(num_rows, np.int32)
        """Number of tokens from which on a stop token ends it."""
        self.taken_at = np.full(num_rows, NO_STEP, np.int32)
        """The step in which the request got the row."""
        self.needs_own_output = np.zeros(num_rows, np.bool_)
        """True if its token is reported by itself, not in the step's columns."""
        self.is_final_only = np.zeros(num_rows, np.bool_)
        """True if nothing is reported before its end."""
        self.constrained = np.zeros(num_rows, np.bool_)  # True if a grammar constrains its tokens
        self.drafts = np.zeros(num_rows, np.int32)  # how many the next step may compute
        self.has_drafted = np.zeros(num_rows, np.bool_)  # True if its latest step makes drafts
        self.draft_tokens = np.zeros((num_rows, most_drafts), np.int32)
        self.most_drafts = np.zeros(num_rows, np.int32)  # that the request wants in a step
        self.rates = AcceptanceRates(num_rows, idle_fading)
        self.fresh = np.zeros(num_rows, np.int32)  # tokens that the last step with it brought
        self.clients = np.zeros(num_rows, np.int32)
        self.numbers = np.zeros(num_rows, np.int64)
        self.stops = np.full((num_rows, 0), NO_TOKEN, np.int32)
        """Tokens that end the request, padded to the longest list."""
        self.flush_every = block_size * max(2, -(-LEAST_TAIL // (2 * block_size)))
        """Tokens after which a growing request flushes its tail: when half of it is full."""
        self.width = 2 * self.flush_every
        self.tails = np.zeros((num_rows, self.width), np.int32)

    def place(self, request: Request, step: int, capacity: int) -> None:
        """Give a free row to a request that has its blocks, from this step on."""
        row = self.free.pop()
        request.enter(row, self.counts[:, row], self.tails[row])
        self.capacity[row] = capacity
        self.prompts[row] = request.num_prompt_tokens
        self.limit[row] = request.length_limit(self.max_model_len)
        self.stops_from[row] = request.stops_from
        self.taken_at[row] = step
        self.is_final_only[row] = request.spec.is_final_only
        self.needs_own_output[row] = request.needs_own_output
        self.constrained[row] = request.grammar is not None
        self.drafts[row], self.fresh[row] = 0, 1
        self.most_drafts[row] = min(request.most_drafts, self.draft_tokens.shape[1])
        self.rates.reset(row)
        self.clients[row], self.numbers[row] = request.client, request.number
        self._set_stops(row, request)

    def first_uncomputed(self, rows: npt.NDArray[np.intp]) -> list[int]:
        """Return `Request.first_uncomputed` of rows [n]."""
        known = self.tokens.take(rows) - self.in_flight.take(rows)
        positions: list[int] = np.minimum(self.computed.take(rows), known - 1).tolist()
        return positions

    def grow(self, rows: npt.NDArray[np.intp], capacities: list[int]) -> npt.NDArray[np.bool_]:
        """Note for how many tokens rows [n] have pages. Return whose tails are half full again."""
        before, after = self.capacity.take(rows), np.array(capacities, np.int32)
        self.capacity[rows] = after
        filling: npt.NDArray[np.bool_] = before // self.flush_every < after // self.flush_every
        return filling

    def leave(self, request: Request) -> None:
        """Take the row from a request, which keeps its counts and tokens."""
        self.taken_at[request.row] = NO_STEP
        self.constrained[request.row] = False
        self.free.append(request.row)
        self.num_released += 1
        request.leave()

    def append_ones(self, rows: npt.NDArray[np.intp], token_ids: IntArray) -> npt.NDArray[np.bool_]:
        """Append one token to each row, which was assumed. Returns who ended."""
        known = self.tokens.take(rows)
        self.in_flight[rows] = in_flight = self.in_flight.take(rows) - 1
        known -= in_flight
        self.tails[rows, (known - 1) % self.width] = token_ids
        if self.draft_tokens.shape[1]:
            self.fresh[rows] = 1
        return self.ended(rows, token_ids, known)

    def append(
        self,
        rows: npt.NDArray[np.intp],
        token_ids: IntArray,
        firsts: npt.NDArray[np.int64],
        num_sampled: IntArray,
        counts: IntArray,
    ) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """Append to each row its `counts` of tokens from `firsts` on, up to one that ends it.

        num_sampled: tokens that were assumed. Returns (tokens that were appended, who ended)."""
        in_flight = self.in_flight.take(rows)
        known = self.tokens.take(rows) - in_flight
        kept, ended = counts, np.zeros(len(rows), np.bool_)
        live = np.arange(len(rows))
        for nth in range(counts.max(initial=1)):
            if nth:
                live = np.flatnonzero(kept > nth)
            some, tokens = rows.take(live), token_ids.take(firsts.take(live) + nth)
            end = known.take(live) + (nth + 1)
            self.tails[some, (end - 1) % self.width] = tokens
            ends = self.ended(some, tokens, end)
            if np.count_nonzero(ends):
                kept = kept.copy() if kept is counts else kept
                kept[live[ends]] = nth + 1
                ended[live[ends]] = True
        self.in_flight[rows] = in_flight - num_sampled
        if self.draft_tokens.shape[1]:
            self.tokens[rows] -= num_sampled - kept
            self.computed[rows] -= num_sampled - kept
            self.fresh[rows] = kept
            self.counts[ACCEPTED, rows] += counts - 1
            self.counts[REJECTED, rows] += num_sampled - counts
            self.rates.learn(rows, num_sampled - 1, counts - 1)
        return kept, ended

    def offer(self, rows: npt.NDArray[np.intp], drafts: IntArray) -> None:
        """Set the rows' drafts [n, most], padded with -1, for their next step."""
        self.draft_tokens[rows] = drafts
        count = np.count_nonzero(drafts >= 0, axis=1)
        self.drafts[rows] = np.minimum(count, self.most_drafts.take(rows))

    def more_drafts(self, rows: npt.NDArray[np.intp], num_tokens: IntArray) -> IntArray:
        """Return how many drafts to add to requests that compute `num_tokens`.

        None unless that is one token, the newest. All could be accepted, and one token follows."""
        room = self.limit.take(rows) - self.tokens.take(rows) - 1
        has_any = (num_tokens == 1) & self.has_drafted.take(rows)
        drafts: IntArray = np.clip(room, 0, self.drafts.take(rows)) * has_any
        return drafts

    def known_tokens(self, rows: npt.NDArray[np.intp], num_drafts: IntArray) -> IntArray:
        """Return (row, position, token) [n, 3] of fresh tokens and of drafts.

        For rows without tokens in flight but those of the step that is being scheduled."""
        ends = self.tokens.take(rows) - self.in_flight.take(rows)
        fresh = self.fresh.take(rows)
        counts = fresh + num_drafts
        which = np.repeat(np.arange(len(rows)), counts)
        nth = np.arange(len(which)) - (counts.cumsum() - counts)[which] - fresh[which]
        row, position = rows[which], ends[which] + nth
        tokens = self.tails[row, position % self.width]
        if self.draft_tokens.shape[1]:
            drafts = self.draft_tokens[row, np.maximum(nth, 0)]
            tokens = np.where(nth < 0, tokens, drafts)
        return np.stack((row, position, tokens), axis=1).astype(np.int32)

    def ended(
        self, rows: npt.NDArray[np.intp], token_ids: IntArray, known: IntArray
    ) -> npt.NDArray[np.bool_]:
        """Return which rows end with their newest token: length, stop token, or error."""
        ended = known >= self.limit.take(rows)
        ended |= token_ids < 0
        if self.stops.shape[1]:
            stopped = (self.stops.take(rows, axis=0) == token_ids[:, None]).any(axis=1)
            ended |= stopped & (known >= self.stops_from.take(rows))
        return ended

    def _set_stops(self, row: int, request: Request) -> None:
        stops = sorted(request.ending_token_ids)
        missing = len(stops) - self.stops.shape[1]
        if missing > 0:
            self.stops = np.pad(self.stops, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
        self.stops[row] = NO_TOKEN
        self.stops[row, : len(stops)] = stops
