"""What a step is, and what it gave: the messages between scheduler and workers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from toolkit.sequence import SequenceSpec

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


@dataclass(slots=True)
class NewRow:
    """A request that takes a row: at first admission, or again after a preemption."""

    row: int
    spec: SequenceSpec
    seed: int
    output_token_ids: list[int]
    num_computed_tokens: int
    blocks: list[int]

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output."""
        if not self.output_token_ids:
            return self.spec.prompt_token_ids
        return self.spec.prompt_token_ids + self.output_token_ids


@dataclass(slots=True)
class SchedulerOutput:
    """One step. Small and total: every worker applies the same message to its own state, in the same order.

    A row is a place in the workers' state that a request keeps while it runs. The arrays are parallel, one
    entry per scheduled request: `rows`, `num_tokens` (to compute now, from `num_computed` on) and `samples`
    (whether its next token is sampled). Copies run before the step: `swap_out` (block, host block) first,
    then `swap_in` (host block, block).
    """

    step: int
    rows: IntArray
    num_tokens: IntArray
    num_computed: IntArray
    samples: npt.NDArray[np.bool_]
    new_rows: list[NewRow] = field(default_factory=list)
    new_blocks: IntArray = field(default_factory=lambda: np.empty((0, 3), np.int32))
    """[num_new, 3]: row, index in its block table, block. For rows that had blocks before."""
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    prompt_logprobs: list[int] = field(default_factory=list)
    """Indices into `rows` of requests whose prompt positions in this step are to be reported."""
    constrained: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Indices into `rows`, rising, of requests whose next token is bound to a grammar. With any of them the step samples
    once their masks come (`Pending.constrain`)."""
    last_tokens: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    """The newest token of each request that samples, for ranks that do not sample themselves: the stages of a pipeline.
    Empty where a token is known to the device that computes on from it."""

    @property
    def total_tokens(self) -> int:
        return int(self.num_tokens.sum())


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities at the sampled positions of one step; entry i belongs to the i-th sampling request.

    `token_ids`, `logprobs`: [num_sampled, 1 + k], the chosen token first, then the k likeliest. `ranks`:
    [num_sampled], 1 for the likeliest token.
    """

    token_ids: IntArray
    logprobs: FloatArray
    ranks: IntArray


@dataclass(slots=True)
class PromptLogprobs:
    """The same for prompt positions `start`, `start + 1`, …: each entry tells of the token at that position."""

    start: int
    values: TokenLogprobs


@dataclass(slots=True)
class ModelOutput:
    """What a step gave. `token_ids`: [num_sampled], in the order of the step's sampling requests; -1 marks a
    request whose logits were not finite.
    """

    step: int
    token_ids: IntArray
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    """By index into the step's rows."""
    pooled: dict[int, FloatArray] = field(default_factory=dict)
    """By index among the sampling requests: the vectors of pooled prompts."""
