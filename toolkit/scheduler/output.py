"""Steps and their results: the messages between scheduler and workers."""

from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from toolkit.sequence import SequenceSpec

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

_NONE = np.empty(0, np.int32)
_NO_PAIRS, _NO_TRIPLES, _NO_INDICES = _NONE.reshape(0, 2), _NONE.reshape(0, 3), np.empty(0, np.intp)


def record_length(k: int) -> int:
    """Return the numbers in a record of log-probabilities with k likeliest tokens.

    `kernels.logprobs` describes records."""
    return 3 + 2 * k


class PlaceAdapter(msgspec.Struct, tag="adapter", frozen=True):
    """Put an adapter into a slot of the devices."""

    slot: int
    key: str


class Encode(msgspec.Struct, tag="feature", frozen=True):
    """Compute the rows of a feature into pages of the encoder cache. Later steps read them."""

    digest: bytes
    pages: list[int]
    grid: tuple[int, int] = (0, 0)  # as in `Feature`
    data: bytes = b""  # of the feature; the core adds them


Load = PlaceAdapter | Encode


@dataclass(slots=True)
class NewRow:
    """A request that gets a row: at first admission, or after a preemption."""

    row: int
    spec: SequenceSpec
    seed: int
    output_token_ids: list[int]
    num_computed_tokens: int
    blocks: list[list[int]]  # pages by group, as `Request.blocks`
    adapter: int = 0  # slot of its LoRA adapter; 0: none

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output."""
        if not self.output_token_ids:
            return self.spec.prompt_token_ids
        return self.spec.prompt_token_ids + self.output_token_ids


@dataclass(slots=True)
class SchedulerOutput:
    """One step. Every worker applies the same message to its own state, in the same order.

    A row is a place in the workers' state that a request keeps while it runs. The arrays are
    parallel, one entry per scheduled request: `rows`, `num_tokens` (to compute now, starting at
    `num_computed`) and `samples` (its next token is sampled). Copies run before the step:
    `swap_out` (block, host block) and `state_swap_out` (slot, host slot), then `swap_in` (host
    block, block) and `state_swap_in` (host slot, slot)."""

    step: int
    rows: IntArray
    num_tokens: IntArray
    num_computed: IntArray
    samples: npt.NDArray[np.bool_]
    num_drafts: IntArray = field(default_factory=lambda: _NONE)
    """Number of each request's last tokens that are drafts. Empty: none are.

    A request that samples computes all its tokens up to the newest, and drafts after it: one token
    is sampled after the newest and after each draft. It begins at its length, which the device
    knows, minus the tokens that are no drafts; `num_computed` is not less, and more if drafts in
    flight are not accepted."""
    new_rows: list[NewRow] = field(default_factory=list)
    new_blocks: IntArray = field(default_factory=lambda: _NO_TRIPLES)
    """[num_new, 3]: row, column of its block table (`cache_group.first_columns`), page. For rows
    that had pages before."""
    state_reads: IntArray = field(default_factory=lambda: _NONE)
    """State slot that each request reads (`scheduler.states`). Empty: the model has no states."""
    state_writes: IntArray = field(default_factory=lambda: _NONE)
    """State slot that each request writes, mostly the same."""
    state_keeps: IntArray = field(default_factory=lambda: _NO_PAIRS)
    """[n, 2]: for each request, a slot where its state is written, too, if the step brings it to so
    many tokens; -1: none."""
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    state_swap_out: list[tuple[int, int]] = field(default_factory=list)
    state_swap_in: list[tuple[int, int]] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    """Loads of the devices before the step."""
    prompt_logprobs: list[int] = field(default_factory=list)
    """Indices into `rows` of requests that report their prompt positions in this step."""
    constrained: npt.NDArray[np.int64] = field(default_factory=lambda: _NO_INDICES)
    """Indices into `rows`, rising, of requests whose next token a grammar constrains. With any of
    them, the step samples when their masks arrive (`Pending.constrain`)."""
    drafts: bool = True
    """False: no request needs drafts after it, since the next step would verify none."""
    known_tokens: IntArray = field(default_factory=lambda: _NO_TRIPLES)
    """[n, 3]: row, position, token. The newest tokens and the drafts of requests that sample, for
    pipeline stages that do not sample themselves. Empty where the device knows them."""

    @property
    def total_tokens(self) -> int:
        return int(self.num_tokens.sum())

    @property
    def num_own_tokens(self) -> IntArray:
        """Tokens of each request that are no drafts."""
        return self.num_tokens - self.num_drafts if len(self.num_drafts) else self.num_tokens

    @property
    def first_points(self) -> npt.NDArray[np.int64]:
        """First point of each request, and the number of all: [num_reqs + 1].

        Points are tokens after which the step may sample: a request's newest, and each draft."""
        if not len(self.num_drafts):
            return np.arange(len(self.rows) + 1)
        return np.concatenate(([0], (self.num_drafts + 1).cumsum()))

    def points_of(
        self, requests: npt.NDArray[np.bool_]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return (request, point) of the points of some requests: arrays [num_points]."""
        firsts, which = self.first_points, requests.nonzero()[0]
        counts = np.diff(firsts)[which]
        nth = np.arange(int(counts.sum())) - np.repeat(counts.cumsum() - counts, counts)
        return np.repeat(which, counts), np.repeat(firsts[which], counts) + nth

    @property
    def num_sampled(self) -> IntArray:
        """Tokens that each sampling request samples, of which `ModelOutput` keeps one or more."""
        if not len(self.num_drafts):
            return np.ones(int(np.count_nonzero(self.samples)), np.int32)
        return 1 + self.num_drafts[self.samples]


@dataclass(slots=True)
class PromptLogprobs:
    """Log-probabilities of the tokens at prompt positions `start`, `start + 1`, …

    `records`: [num_positions, 3 + 2k], see `kernels.logprobs`."""

    start: int
    records: IntArray


@dataclass(slots=True)
class ModelOutput:
    """Results of a step.

    `token_ids`: new tokens, in the order of the step's sampling requests; -1 marks a request whose
    logits were not finite, and is its last. A request that computed no drafts has one token."""

    step: int
    token_ids: IntArray
    logprobs: IntArray | None = None
    """[num_sampled, 3 + 2k]: records (`kernels.logprobs`), k the greatest number that a request
    of the step wants. Those of requests that want none may be anything."""
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    """By index into the step's rows."""
    pooled: dict[int, FloatArray] = field(default_factory=dict)
    """Vectors of pooled prompts, by index into `token_ids`."""
    num_compiled: int = 0  # kernels compiled since the last step, which should be none
    failures: dict[int, str] = field(default_factory=dict)
    """Errors of logits processors, by index into `token_ids`, which is -1 there."""
    counts: IntArray | None = None
    """Tokens of each sampling request: its accepted drafts, and one more. None: one each."""
    drafts: IntArray | None = None
    """[num_sampled, most]: drafts of the tokens that follow, padded with -1. None: no drafter."""
