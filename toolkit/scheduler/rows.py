"""The running requests in columns, one row each, so that a step costs NumPy calls and no loop over requests."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from toolkit.scheduler.output import IntArray
from toolkit.scheduler.request import NUM_COUNTS, Request

NOBODY = np.iinfo(np.int32).max
NO_TOKEN = -2
LEAST_TAIL = 256


class Rows:
    """Row r is the place of one request from its admission to its end or preemption.

    `counts` [3, num_rows] is where a running request's counts are: `Request` reads and writes them here, and the
    scheduler does so for many at once. `tails` [num_rows, width] holds each row's newest tokens, that of position
    p at p modulo the width; the request takes them over before they are overwritten (`Request.settle`).
    """

    def __init__(self, num_rows: int, block_size: int) -> None:
        self.counts = np.zeros((NUM_COUNTS, num_rows), np.int32)
        self.computed, self.tokens, self.in_flight = self.counts
        self.prompts = np.zeros(num_rows, np.int32)
        """Tokens of the prompt."""
        self.capacity = np.zeros(num_rows, np.int32)
        """Tokens that the row's blocks hold."""
        self.limit = np.zeros(num_rows, np.int32)
        """Tokens with which the request ends."""
        self.stops_from = np.zeros(num_rows, np.int32)
        """Tokens from which on a stop token ends it."""
        self.taken_at = np.full(num_rows, NOBODY, np.int32)
        """The step that gave the row to its request."""
        self.single = np.zeros(num_rows, np.bool_)
        """Whether each of its tokens is told by itself, not in the step's columns."""
        self.quiet = np.zeros(num_rows, np.bool_)
        """Whether nothing is told before its end."""
        self.constrained = np.zeros(num_rows, np.bool_)
        """Whether its tokens are bound to a grammar."""
        self.clients = np.zeros(num_rows, np.int32)
        self.numbers = np.zeros(num_rows, np.int64)
        self.stops = np.full((num_rows, 0), NO_TOKEN, np.int32)
        """Tokens that end the request; as wide as the most that one has."""
        self._block_size = block_size
        self.settle_every = max(2, -(-LEAST_TAIL // (2 * block_size)))
        """Blocks after which a growing request takes its tokens over: when half of its tail is full."""
        self.width = 2 * self.settle_every * block_size
        self.tails = np.zeros((num_rows, self.width), np.int32)

    def place(self, request: Request, row: int, step: int, max_model_len: int) -> None:
        """Gives a row to a request that has its blocks."""
        request.enter(row, self.counts[:, row], self.tails[row])
        self.capacity[row] = len(request.blocks) * self._block_size
        self.prompts[row] = request.num_prompt_tokens
        self.limit[row] = request.length_limit(max_model_len)
        self.stops_from[row] = request.stops_from
        self.taken_at[row] = step
        self.quiet[row] = request.spec.is_final_only
        self.single[row] = request.tells_singly
        self.constrained[row] = request.grammar is not None
        self.clients[row], self.numbers[row] = request.client, request.number
        self._set_stops(row, request)

    def leave(self, request: Request) -> None:
        """Takes the row from a request, which keeps its counts and tokens."""
        self.taken_at[request.row] = NOBODY
        self.constrained[request.row] = False
        request.leave()

    def sampled(self, rows: npt.NDArray[np.intp], token_ids: IntArray) -> IntArray:
        """Takes in one new token for each of some rows; how many tokens they now know."""
        known = self.tokens.take(rows)
        self.in_flight[rows] = in_flight = self.in_flight.take(rows) - 1
        known -= in_flight
        self.tails[rows, (known - 1) % self.width] = token_ids
        return known

    def newest(self, rows: npt.NDArray[np.intp], ends: IntArray) -> IntArray:
        """The tokens before the positions `ends`, the first that these rows do not know."""
        return self.tails[rows, (ends - 1) % self.width]

    def ended(
        self, rows: npt.NDArray[np.intp], token_ids: IntArray, known: IntArray
    ) -> npt.NDArray[np.bool_]:
        """Which of them end with their newest token: by length, by a stop token, or because it is no token."""
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
