"""One step while it is put together, while it runs, and what it gave."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from toolkit.scheduler.output import IntArray, NewRow, PromptLogprobs
from toolkit.scheduler.request import Request

RowArray = npt.NDArray[np.intp]
BoolArray = npt.NDArray[np.bool_]


@dataclass(slots=True)
class StepResult:
    """What one step gave one request, when that is more than a token."""

    request: Request
    token_id: int | None = None
    sample: int = -1
    """Index of its token among those the step sampled."""
    prompt_logprobs: PromptLogprobs | None = None
    error: str | None = None


@dataclass(slots=True)
class StepResults:
    """What one step gave all requests.

    `clients`, `numbers`, `token_ids` [num_plain]: requests that got a token and nothing else. `others`: those of
    which there is more to tell. A request whose tokens are told together at its end is in neither before.
    """

    clients: IntArray
    numbers: npt.NDArray[np.int64]
    token_ids: IntArray
    others: list[StepResult] = field(default_factory=list)


@dataclass(slots=True)
class Lineup:
    """The running requests in rank order, and their rows. Steps in flight hold on to it: it is never changed."""

    requests: list[Request]
    rows: RowArray
    rows_int32: IntArray
    wants_prompt_logprobs: bool


@dataclass(slots=True)
class Together:
    """The part of a step that was made in one go."""

    requests: list[Request]
    rows: RowArray
    rows_int32: IntArray
    num_tokens: IntArray
    num_computed: IntArray
    samples: BoolArray

    def without_idle(self) -> Together:
        """Without the requests that compute nothing."""
        busy = np.flatnonzero(self.num_tokens)
        return Together(
            [self.requests[index] for index in busy.tolist()],
            self.rows[busy],
            self.rows_int32[busy],
            self.num_tokens[busy],
            self.num_computed[busy],
            self.samples[busy],
        )

    def wanting_prompt_logprobs(self) -> list[int]:
        """Indices of the requests that compute prompt positions which are to be reported."""
        pairs = enumerate(zip(self.requests, self.num_computed.tolist(), strict=True))
        return [
            index
            for index, (request, computed) in pairs
            if request.wants_prompt_logprobs and computed < request.num_prompt_tokens - 1
        ]


@dataclass(slots=True)
class Step:
    """A step being put together: requests that were scheduled together, then others one by one."""

    budget: int
    most_requests: int = sys.maxsize
    """Requests with which no other is admitted."""
    together: Together | None = None
    requests: list[Request] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_computed: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)
    new_blocks: list[int] = field(default_factory=list)
    """Three numbers each."""
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    prompt_logprobs: list[int] = field(default_factory=list)
    preempted: bool = False

    @property
    def num_requests(self) -> int:
        return len(self.requests) + (0 if self.together is None else len(self.together.requests))


@dataclass(slots=True)
class InFlight:
    """A step whose tokens are not known yet."""

    requests: list[Request]
    rows: RowArray
    admitted: list[Request]
    num_rows_left: int
    """How many times a row had been left when it was scheduled."""
