"""What front end and engine core tell each other: msgspec structs, sent as MessagePack."""

from __future__ import annotations

import msgspec

from toolkit.config import EngineConfig
from toolkit.sampling.params import SamplingParams
from toolkit.worker import WorkerInfo


class EngineRequest(msgspec.Struct, kw_only=True, tag="add"):
    """A checked request. `max_tokens` is resolved against the context length.

    Its n sequences are known by their client, which is the front end that asks, and their numbers, `number` and
    the n - 1 that follow: no front end uses a number twice.
    """

    id: str
    client: int = 0
    number: int = 0
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    eos_token_ids: list[int]
    priority: int = 0
    cache_salt: str = ""
    whole: bool = False
    """Whether the tokens come together at the end, and not as they are known."""


class Abort(msgspec.Struct, tag="abort"):
    """Sequences to end, by number."""

    numbers: list[int]
    client: int = 0


class Leave(msgspec.Struct, tag="leave"):
    """A front end is gone: its sequences end, and what still comes of it is dropped."""

    client: int


class ResetPrefixCache(msgspec.Struct, tag="reset"):
    """Forget all cached content."""


class Stop(msgspec.Struct, tag="stop"):
    """End the process."""


class LogprobEntry(msgspec.Struct, array_like=True):
    """One position: the token itself first, then the likeliest; `rank` is the first one's."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class EngineOutput(msgspec.Struct, array_like=True, omit_defaults=True):
    """What one step gave one sequence, when that is more than a token: its first token, its end,
    log-probabilities, an error.
    """

    number: int
    token_ids: list[int]
    """New ones; of a sequence whose tokens come together, all."""
    finish_reason: str | None = None
    stop_reason: int | None = None
    logprobs: LogprobEntry | None = None
    prompt_logprobs: list[LogprobEntry] | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    error: str | None = None


class EngineStats(msgspec.Struct, array_like=True):
    """Gauges of now, counts of one step."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    num_tokens: int = 0
    """Tokens the step computed."""
    num_sampled: int = 0
    """Tokens the step sampled."""


class EngineOutputs(msgspec.Struct, tag="outputs"):
    """One message for each step and front end."""

    outputs: list[EngineOutput] = []
    numbers: bytes = b""
    """int64 each: sequences that got one token and nothing else. `token_ids` has the tokens, int32 each."""
    token_ids: bytes = b""
    stats: EngineStats | None = None
    """For the first front end."""
    scheduled: list[int] = []
    """Sequences that began to run in this step."""
    scheduled_at: float = 0.0
    """When they did, on the machine's monotonic clock, which all processes share."""


class Phase(msgspec.Struct, tag="phase"):
    """A part of start-up is done."""

    name: str
    seconds: float


class Ready(msgspec.Struct, tag="ready"):
    """Requests can come."""

    info: WorkerInfo


class Failed(msgspec.Struct, tag="failed"):
    """The core ends. `kind` is the class of a ToolkitError, or empty for a bug, whose traceback is in the
    log.
    """

    kind: str
    message: str


class Start(msgspec.Struct):
    """The first message to a core process."""

    config: EngineConfig
    folder: str
    log_level: str


ToCore = EngineRequest | Abort | Leave | ResetPrefixCache | Stop
FromCore = EngineOutputs | Phase | Ready | Failed
