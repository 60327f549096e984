"""Outputs of the Python API. Their fields follow vLLM's."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprob:
    """Log-probability of a token at one position. `rank`: 1 for the likeliest, None if unknown."""

    logprob: float
    rank: int | None
    decoded_token: str


PositionLogprobs = dict[int, Logprob]  # by token id. The token in the output comes first


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's n answers so far."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """Stop string or stop token that ended the answer. None for the model's end token."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request and its answers so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    finished: bool = False
    num_cached_tokens: int = 0


@dataclass(slots=True)
class Delta:
    """New output of one answer."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    embedding: bytes = b""  # float32 vector of a pooled prompt
