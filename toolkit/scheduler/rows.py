"""Running requests as columns, so that a step costs NumPy calls instead of a loop."""

import numpy as np
import numpy.typing as npt

from toolkit.scheduler.output import IntArray
from toolkit.scheduler.request import NUM_COUNTS, Request

NO_STEP = np.iinfo(np.int32).max
NO_TOKEN = -2
LEAST_TAIL = 256


class Rows:
    """Row r belongs to one request from its admission to its end or preemption.

    `counts` [3, num_rows] holds the counts of running requests: `Request` reads and writes its own,
    the scheduler many at once. `tails` [num_rows, width] holds each row's newest tokens, position p
    at p modulo the width; the request copies them before they are overwritten
    (`Request.flush_tail`)."""

    def __init__(self, num_rows: int, block_size: int) -> None:
        self.counts = np.zeros((NUM_COUNTS, num_rows), np.int32)
        self.computed, self.tokens, self.in_flight = self.counts
        self.prompts = np.zeros(num_rows, np.int32)  # tokens of the prompt
        self.capacity = np.zeros(num_rows, np.int32)  # tokens that the row's blocks hold
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
        self.clients = np.zeros(num_rows, np.int32)
        self.numbers = np.zeros(num_rows, np.int64)
        self.stops = np.full((num_rows, 0), NO_TOKEN, np.int32)
        """Tokens that end the request, padded to the longest list."""
        self._block_size = block_size
        self.flush_every = max(2, -(-LEAST_TAIL // (2 * block_size)))
        """Blocks after which a growing request flushes its tail: when half of it is full."""
        self.width = 2 * self.flush_every * block_size
        self.tails = np.zeros((num_rows, self.width), np.int32)

    def place(self, request: Request, row: int, step: int, max_model_len: int) -> None:
        """Give a row to a request that has its blocks."""
        request.enter(row, self.counts[:, row], self.tails[row])
        self.capacity[row] = len(request.blocks) * self._block_size
        self.prompts[row] = request.num_prompt_tokens
        self.limit[row] = request.length_limit(max_model_len)
        self.stops_from[row] = request.stops_from
        self.taken_at[row] = step
        self.is_final_only[row] = request.spec.is_final_only
        self.needs_own_output[row] = request.needs_own_output
        self.constrained[row] = request.grammar is not None
        self.clients[row], self.numbers[row] = request.client, request.number
        self._set_stops(row, request)

    def leave(self, request: Request) -> None:
        """Take the row from a request, which keeps its counts and tokens."""
        self.taken_at[request.row] = NO_STEP
        self.constrained[request.row] = False
        request.leave()

    def sampled(self, rows: npt.NDArray[np.intp], token_ids: IntArray) -> IntArray:
        """Append one token to each row. Return the numbers of known tokens."""
        known = self.tokens.take(rows)
        self.in_flight[rows] = in_flight = self.in_flight.take(rows) - 1
        known -= in_flight
        self.tails[rows, (known - 1) % self.width] = token_ids
        return known

    def newest(self, rows: npt.NDArray[np.intp], ends: IntArray) -> IntArray:
        """Return the tokens before the positions `ends`, the first unknown ones of these rows."""
        return self.tails[rows, (ends - 1) % self.width]

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
