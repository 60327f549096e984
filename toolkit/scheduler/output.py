"""Steps and their results: the messages between scheduler and workers."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from toolkit.sequence import SequenceSpec

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


@dataclass(slots=True)
class NewRow:
    """A request that gets a row: at first admission, or after a preemption."""

    row: int
    spec: SequenceSpec
    seed: int
    output_token_ids: list[int]
    num_computed_tokens: int
    blocks: list[int]
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
    `swap_out` (block, host block), then `swap_in` (host block, block)."""

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
    adapters: list[tuple[int, str]] = field(default_factory=list)
    """Adapters to place before the step: (slot, key)."""
    prompt_logprobs: list[int] = field(default_factory=list)
    """Indices into `rows` of requests that report their prompt positions in this step."""
    constrained: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Indices into `rows`, rising, of requests whose next token a grammar constrains. With any of
    them, the step samples when their masks arrive (`Pending.constrain`)."""
    last_tokens: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    """The newest token of each request that samples, for pipeline stages that do not sample
    themselves. Empty where the device that continues knows the token."""

    @property
    def total_tokens(self) -> int:
        return int(self.num_tokens.sum())


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities at the sampled positions of one step, in order of its sampling requests.

    `token_ids`, `logprobs`: [num_sampled, 1 + k], the chosen token first, then the k likeliest.
    `ranks`: [num_sampled], 1 for the likeliest token."""

    token_ids: IntArray
    logprobs: FloatArray
    ranks: IntArray


@dataclass(slots=True)
class PromptLogprobs:
    """Log-probabilities of the tokens at prompt positions `start`, `start + 1`, …"""

    start: int
    values: TokenLogprobs


@dataclass(slots=True)
class ModelOutput:
    """Results of a step.

    `token_ids`: [num_sampled], in the order of the step's sampling requests; -1 marks a request
    whose logits were not finite."""

    step: int
    token_ids: IntArray
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    """By index into the step's rows."""
    pooled: dict[int, FloatArray] = field(default_factory=dict)
    """Vectors of pooled prompts, by index among the sampling requests."""
    num_compiled: int = 0  # kernels compiled since the last step, which should be none
    failures: dict[int, str] = field(default_factory=dict)
    """Errors of logits processors, by index among the sampling requests, whose token is -1."""
