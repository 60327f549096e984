"""One sequence being generated, as the scheduler sees it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from toolkit.sampling.params import SamplingParams
from toolkit.scheduler.block_pool import BlockHash, hash_block


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Waiting again; its cache was dropped and is computed anew."""
    SWAPPED = "swapped"
    """Waiting again; its cache is in host memory."""
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence being generated. Lengths are in tokens.

    `num_computed_tokens` counts what is in the KV cache once every step that was scheduled has run; the token
    that such a step samples is counted by `num_in_flight` until it is known.
    """

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    arrival: int = 0
    """Rank among requests of one priority."""
    seed: int = 0
    cache_salt: str = ""
    """Requests with different salts share no cache."""
    cacheable: bool = True
    """Whether its blocks may be found by others, and others' by it."""
    leader: Request | None = None
    """The sibling whose prompt blocks this one shares (n > 1): it waits until they are computed."""

    status: RequestStatus = RequestStatus.WAITING
    row: int = -1
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_in_flight: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache gave at first admission."""
    num_preemptions: int = 0
    blocks: list[int] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)
    block_hashes: list[BlockHash] = field(default_factory=list)
    num_remembered_blocks: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    """The stop token that ended it, when it was not the model's own."""
    stop_token_ids: frozenset[int] = frozenset()
    num_prompt_logprobs: int = 0
    """Prompt positions whose log-probabilities have been reported."""

    def __post_init__(self) -> None:
        self.stop_token_ids = frozenset(self.params.stop_token_ids or ())

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Those sampled, known or not yet known."""
        return len(self.output_token_ids) + self.num_in_flight

    @property
    def num_known_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        return self.num_known_tokens + self.num_in_flight

    @property
    def num_tokens_to_compute(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt positions are still to be reported; such a request computes its whole prompt."""
        return (
            self.params.prompt_logprobs is not None and self.num_prompt_logprobs < self.num_prompt_tokens - 1
        )

    def hashes(self, block_size: int) -> list[BlockHash]:
        """The names of all full blocks of known tokens."""
        known = self.num_known_tokens // block_size
        if len(self.block_hashes) < known:
            tokens = self.token_ids
            for index in range(len(self.block_hashes), known):
                parent = self.block_hashes[-1] if self.block_hashes else b""
                chunk = tokens[index * block_size : (index + 1) * block_size]
                self.block_hashes.append(hash_block(parent, chunk, self.cache_salt))
        return self.block_hashes
