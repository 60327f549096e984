"""One step: while it is built, in flight, and its results."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from toolkit.scheduler.output import IntArray, Load, NewRow, PromptLogprobs
from toolkit.scheduler.request import Request

RowArray = npt.NDArray[np.intp]
BoolArray = npt.NDArray[np.bool_]


@dataclass(slots=True)
class StepResult:
    """Result of one step for one request, if it is more than a token."""

    request: Request
    token_id: int | None = None
    sample: int = -1  # index of its token among those the step sampled
    prompt_logprobs: PromptLogprobs | None = None
    error: str | None = None
    is_newest: bool = True  # of the request's results in the step, the last: it may be the end


@dataclass(slots=True)
class StepResults:
    """Results of one step for all requests.

    `clients`, `numbers`, `token_ids` [num_plain]: requests that got a token and nothing else, and
    `samples` [num_plain], the indices of these tokens among those the step sampled. `others`:
    requests with more to report. A request that reports only at its end is in neither before
    then."""

    clients: IntArray
    numbers: npt.NDArray[np.int64]
    token_ids: IntArray
    others: list[StepResult] = field(default_factory=list)
    samples: RowArray = field(default_factory=lambda: np.empty(0, np.intp))


@dataclass(slots=True)
class RunningBatch:
    """Running requests in rank order, and their rows. Immutable: steps in flight refer to it."""

    requests: list[Request]
    rows: RowArray
    rows_int32: IntArray
    wants_prompt_logprobs: bool
    has_features: bool


@dataclass(slots=True)
class BatchPart:
    """A part of a step, as parallel arrays."""

    requests: list[Request]
    rows: RowArray
    rows_int32: IntArray
    num_tokens: IntArray
    num_computed: IntArray
    samples: BoolArray
    num_drafts: IntArray | None = None  # None: no request has any

    def only(self, which: npt.NDArray[np.intp]) -> BatchPart:
        """Return the part with some of its requests."""
        return BatchPart(
            [self.requests[index] for index in which.tolist()],
            self.rows[which],
            self.rows_int32[which],
            self.num_tokens[which],
            self.num_computed[which],
            self.samples[which],
            None if self.num_drafts is None else self.num_drafts[which],
        )

    def wanting_prompt_logprobs(self) -> list[int]:
        """Return indices of the requests that compute prompt positions to report."""
        pairs = enumerate(zip(self.requests, self.num_computed.tolist(), strict=True))
        return [
            index
            for index, (request, computed) in pairs
            if request.wants_prompt_logprobs and computed < request.num_prompt_tokens - 1
        ]


@dataclass(slots=True)
class Allotment:
    """Tokens of the running requests in a step: arrays [n], in order of rank."""

    batch: RunningBatch
    computed: IntArray
    tokens: IntArray
    num_tokens: IntArray  # with drafts
    num_drafts: IntArray | None  # None: no request has any
    decodes: BoolArray  # it computes its newest token, and no prompt
    all_decode: bool  # all of them do, with all their drafts
    total: int  # of `num_tokens`, if `all_decode`


@dataclass(slots=True)
class StepLimits:
    """Most that a step and its requests may have."""

    max_num_seqs: int
    max_num_batched_tokens: int
    num_stages: int = 1
    """Pipeline stages; that many steps in flight have different requests."""
    chunks_prompts: bool = True
    """A prompt may span several steps; else a long one gets its own step."""
    most_drafts: int = 0  # that all requests together verify

    def halve(self, num_tokens: int, num_requests: int) -> None:
        """Allow half of a step that was too large for the memory."""
        self.max_num_batched_tokens = max(1, min(self.max_num_batched_tokens, num_tokens) // 2)
        self.max_num_seqs = max(1, min(self.max_num_seqs, num_requests + 1) // 2)


@dataclass(slots=True)
class StepBuilder:
    """A step being built: a batch of running requests, then others one by one."""

    budget: int
    most_requests: int = sys.maxsize  # number of requests from which on no other is admitted
    together: BatchPart | None = None
    requests: list[Request] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_computed: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    num_drafts: list[int] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)
    new_blocks: list[int] = field(default_factory=list)
    """Three numbers per block: row, index, block."""
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    state_swap_out: list[tuple[int, int]] = field(default_factory=list)
    state_swap_in: list[tuple[int, int]] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    prompt_logprobs: list[int] = field(default_factory=list)
    state_reads: dict[int, int] = field(default_factory=dict)
    """State slots by row, of requests that read another one than they write."""
    state_keeps: dict[int, tuple[int, int]] = field(default_factory=dict)
    """(slot, tokens of the step before it) by row, of requests whose state is also kept."""
    preempted: bool = False

    @property
    def num_requests(self) -> int:
        return len(self.requests) + (0 if self.together is None else len(self.together.requests))

    def add(self, request: Request, num_tokens: int, samples: bool, num_drafts: int) -> None:
        """Add a request's next tokens."""
        computed = request.num_computed_tokens
        if request.wants_prompt_logprobs and computed < request.num_prompt_tokens - 1:
            self.prompt_logprobs.append(self.num_requests)
        self.requests.append(request)
        self.num_tokens.append(num_tokens)
        self.num_computed.append(computed)
        self.samples.append(samples)
        self.num_drafts.append(num_drafts)
        self.budget -= num_tokens

    def joined(self) -> BatchPart:
        """Return the batch and the other requests as one."""
        if self.together is not None and not self.requests:
            return self.together
        rows = np.array([request.row for request in self.requests], np.intp)
        part = BatchPart(
            self.requests,
            rows,
            rows.astype(np.int32),
            np.array(self.num_tokens, np.int32),
            np.array(self.num_computed, np.int32),
            np.array(self.samples, np.bool_),
            np.array(self.num_drafts, np.int32) if any(self.num_drafts) else None,
        )
        if self.together is None:
            return part
        first = self.together
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


@dataclass(slots=True)
class StepInFlight:
    """A step whose tokens are not known yet."""

    requests: list[Request]
    rows: RowArray
    admitted: list[Request]
    num_rows_released: int  # rows released before it was scheduled
    loading: list[Request]  # for which it computes features
