"""One sequence being generated, as the scheduler sees it."""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field

import numpy as np

from toolkit.sampling.grammar import GrammarState
from toolkit.sampling.params import SamplingParams
from toolkit.scheduler.blocks.block_pool import BlockHash, hash_block
from toolkit.scheduler.output import IntArray
from toolkit.sequence import SequenceSpec

COMPUTED, TOKENS, IN_FLIGHT, ACCEPTED, REJECTED = range(5)
"""Rows of a request's counts: tokens in the KV cache, all tokens, tokens not known yet, drafts that
were accepted and rejected."""
NUM_COUNTS = 5
MAX_DRAFTS = 2**31 - 1
NO_SLOT = -1
HOLE = -1  # in a table, for tokens that nothing reads any more


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waiting again; its cache was dropped and is recomputed
    SWAPPED = "swapped"  # waiting again; its cache is in host memory
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    INVALID = "invalid"  # an error of the request: its constraints allow no further token


@dataclass(slots=True, eq=False)
class Request:
    """One sequence being generated. Lengths are in tokens.

    `num_computed_tokens` counts the tokens in the KV cache once every scheduled step has run. The
    tokens that such a step samples are counted by `num_in_flight` until they are known. With
    drafts, both are upper bounds until then: tokens after a wrong draft are taken off again. Known
    tokens are exact, and a block of them is final.

    While the request runs, its counts and newest tokens are in the scheduler's `Rows`, where a step
    changes those of all requests at once. The properties read them there."""

    id: str
    spec: SequenceSpec
    arrival: int = 0  # rank among requests of one priority
    seed: int = 0
    cache_salt: str = ""
    """Salt of its block hashes: the spec's, or its own where prefix caching is off."""
    cacheable: bool = True  # its blocks are shared with other requests
    leader: Request | None = None
    """The sibling (n > 1) whose prompt blocks this one shares once they are computed."""
    client: int = 0  # number of the front end that sent it
    number: int = 0  # the front end's number of the sequence
    grammar: GrammarState | None = None  # grammar that constrains its tokens

    status: RequestStatus = RequestStatus.WAITING
    row: int = -1
    state_slot: int = NO_SLOT  # of its state; see `states.StateSlots`
    host_slot: int = NO_SLOT  # of its state while it is swapped
    num_followers: int = 0  # siblings that may begin with its prompt
    branch: int = 0  # tokens after which other prompts part from its own; 0: none is known
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    num_preemptions: int = 0
    blocks: list[list[int]] = field(default_factory=list)
    """Pages of the KV cache by group of layers (`CacheGroup`), in order. Empty: it has none."""
    host_blocks: list[list[int]] = field(default_factory=list)
    block_hashes: list[BlockHash] = field(default_factory=list)
    num_registered: list[int] = field(default_factory=list)
    """Pages in the prefix cache, by group; `num_trimmed`: pages that may have been freed."""
    num_trimmed: list[int] = field(default_factory=list)
    anchors: tuple[int, ...] = ()
    """Tokens after which other requests may begin: the end of its prompt first."""
    name: str = ""  # request id in the front end, shared by siblings
    origin: str = ""  # address of the HTTP client
    arrived_at: float = 0.0  # seconds on the machine's monotonic clock, like `first_run_at`
    first_run_at: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token that ended it, unless it is the model's own
    stop_token_ids: frozenset[int] = frozenset()
    num_prompt_logprobs: int = 0  # prompt positions whose log-probabilities have been reported
    _counts: IntArray = field(default_factory=lambda: np.zeros(NUM_COUNTS, np.int32))
    _outputs: list[int] = field(default_factory=list)
    _tail: IntArray | None = None
    """Its newest tokens while it runs: position p at p modulo the length. `_outputs` lacks some."""

    def __post_init__(self) -> None:
        self.stop_token_ids = frozenset(self.spec.params.stop_token_ids or ())
        self._counts[TOKENS] = len(self.prompt_token_ids)

    @property
    def params(self) -> SamplingParams:
        return self.spec.params

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.spec.prompt_token_ids

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.spec.prompt_token_ids)

    @property
    def num_computed_tokens(self) -> int:
        return self._counts.item(COMPUTED)

    @num_computed_tokens.setter
    def num_computed_tokens(self, value: int) -> None:
        self._counts[COMPUTED] = value

    @property
    def num_in_flight(self) -> int:
        return self._counts.item(IN_FLIGHT)

    @property
    def num_accepted_drafts(self) -> int:
        return self._counts.item(ACCEPTED)

    @property
    def num_rejected_drafts(self) -> int:
        return self._counts.item(REJECTED)

    @property
    def most_drafts(self) -> int:
        """Most drafts that a step may verify. None with logits processors: they see each token
        once."""
        wanted = self.params.num_speculative_tokens
        if self.params.extra_args or self.spec.pooling is not None:
            return 0
        return MAX_DRAFTS if wanted is None else wanted

    @property
    def num_tokens(self) -> int:
        """Prompt tokens and sampled ones, known or not yet known."""
        return self._counts.item(TOKENS)

    @property
    def num_known_tokens(self) -> int:
        return self._counts.item(TOKENS) - self._counts.item(IN_FLIGHT)

    @property
    def first_uncomputed(self) -> int:
        """Position of the first token that a later step may compute.

        Drafts may be wrong: it is no later than the newest known token."""
        return min(self.num_computed_tokens, self.num_known_tokens - 1)

    @property
    def num_tokens_to_compute(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """Known output tokens. Read only."""
        self.flush_tail()
        return self._outputs

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids

    @property
    def ending_token_ids(self) -> frozenset[int]:
        """Tokens that end it once it has `min_tokens`."""
        return (
            self.stop_token_ids
            if self.params.ignore_eos
            else self.stop_token_ids.union(self.spec.eos_token_ids)
        )

    @property
    def stops_from(self) -> int:
        """Number of tokens, prompt and output, from which on a stop token ends it.

        A grammar enforces `min_tokens` itself."""
        return self.num_prompt_tokens + (self.params.min_tokens if self.grammar is None else 0)

    @property
    def excludes_tokens(self) -> bool:
        """True if its parameters or its logits processors forbid some tokens, maybe all."""
        params = self.params
        return self.grammar is not None or bool(
            params.allowed_token_ids or params.bad_words_token_ids or params.extra_args
        )

    @property
    def needs_own_output(self) -> bool:
        """True if it reports more than its next token: the first one brings the cached tokens."""
        return not self.spec.is_final_only and self.num_known_tokens == self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True while prompt positions are unreported. Such a request computes its whole prompt."""
        return (
            self.params.prompt_logprobs is not None
            and self.num_prompt_logprobs < self.num_prompt_tokens - 1
        )

    @property
    def computes_all(self) -> bool:
        """True if it computes all of its prompt, although the prefix cache may have some of it."""
        return self.wants_prompt_logprobs or self.spec.pooling is not None

    @property
    def num_blocks(self) -> int:
        """Number of pages that it holds."""
        return sum(len(table) - table.count(HOLE) for table in self.blocks)

    def follow(self) -> None:
        """Count a sibling that waits for its leader."""
        if self.leader is not None:
            self.leader.num_followers += 1

    def unfollow(self) -> None:
        """Stop counting a sibling, which has begun or ended."""
        leader, self.leader = self.leader, None
        if leader is not None:
            leader.num_followers -= 1

    def resume(self, output_token_ids: list[int]) -> None:
        """Set the output tokens that it already has, before it is added."""
        self._outputs = list(output_token_ids)
        self._counts[TOKENS] += len(output_token_ids)
        self.status = RequestStatus.PREEMPTED

    def length_limit(self, max_model_len: int) -> int:
        """Return the tokens, prompt and output, with which it ends at the latest."""
        longest = min(self.num_prompt_tokens + self.spec.max_tokens, max_model_len)
        return max(longest, self.num_prompt_tokens + 1)

    def schedule(self, num_tokens: int, num_sampled: int) -> None:
        """Count the tokens that the next step computes, and those that it samples."""
        self._counts[COMPUTED] += num_tokens
        self._counts[TOKENS] += num_sampled
        self._counts[IN_FLIGHT] += num_sampled

    def reject(self, num_tokens: int) -> None:
        """Drop sampled tokens that follow a wrong draft. For a request without a row."""
        self._counts[TOKENS] -= num_tokens
        self._counts[IN_FLIGHT] -= num_tokens
        if self._counts[COMPUTED]:  # else they are recomputed anyway
            self._counts[COMPUTED] -= num_tokens

    def append(self, token_id: int) -> None:
        """Append a token that was in flight. For a request without a row."""
        self._counts[IN_FLIGHT] -= 1
        self._outputs.append(token_id)

    def drop_last(self) -> None:
        """Drop the newest token."""
        self.flush_tail()
        self._outputs.pop()
        self._counts[TOKENS] -= 1

    def drop_in_flight(self) -> None:
        """Drop the tokens in flight."""
        self._counts[TOKENS] -= self._counts[IN_FLIGHT]
        self._counts[IN_FLIGHT] = 0

    def enter(self, row: int, counts: IntArray, tail: IntArray) -> None:
        """Move the counts to a row. `counts` and `tail` are views of it."""
        self.row = row
        counts[:] = self._counts
        newest = self._outputs[-1] if self._outputs else self.prompt_token_ids[-1]
        tail[(self.num_known_tokens - 1) % len(tail)] = newest
        self._counts, self._tail = counts, tail

    def leave(self) -> None:
        """Copy counts and tokens out of the row."""
        self.flush_tail()
        self.row = -1
        self._counts, self._tail = self._counts.copy(), None

    def flush_tail(self) -> None:
        """Append the tokens that are only in the tail to the outputs."""
        if self._tail is not None:
            first, end = self.num_prompt_tokens + len(self._outputs), self.num_known_tokens
            if first < end:
                self._outputs += self._tail.take(np.arange(first, end), mode="wrap").tolist()

    def hashes(self, num_blocks: int, block_size: int) -> list[BlockHash]:
        """Return hashes of at least the first `num_blocks` blocks, all full of known tokens."""
        hashes = self.block_hashes
        first = len(hashes) * block_size
        if first < num_blocks * block_size:
            size = 4 * block_size
            end = num_blocks * block_size
            tokens = self._tokens_in(first, end)
            keys = self.spec.features_keys(first, end, block_size)
            for at, key in zip(range(0, len(tokens), size), keys, strict=True):
                parent = hashes[-1] if hashes else b""
                hashes.append(hash_block(parent, tokens[at : at + size], self.cache_salt + key))
        return hashes

    def _tokens_in(self, start: int, end: int) -> bytes:
        """Return the tokens at these positions, int32 each."""
        num_prompt = len(self.prompt_token_ids)
        tokens = self.prompt_token_ids[start:end]
        if end > num_prompt:
            tokens = tokens + self.output_token_ids[max(0, start - num_prompt) : end - num_prompt]
        return array("i", tokens).tobytes()
