"""What front end and engine core tell each other: msgspec structs, sent as MessagePack."""

from __future__ import annotations

import msgspec

from toolkit.config import EngineConfig
from toolkit.sampling.params import SamplingParams
from toolkit.worker import WorkerInfo


class EngineRequest(msgspec.Struct, kw_only=True, tag="add"):
    """A checked request. `max_tokens` is resolved against the context length."""

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    eos_token_ids: list[int]
    priority: int = 0
    cache_salt: str = ""


class Abort(msgspec.Struct, tag="abort"):
    """Sequences to end: `id/index` each."""

    sequences: list[str]


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
    """What one step gave one sequence. Nearly always a token and nothing else."""

    id: str
    index: int
    token_ids: list[int]
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


class EngineOutputs(msgspec.Struct, tag="outputs"):
    """One message for each step."""

    outputs: list[EngineOutput]
    stats: EngineStats
    scheduled: list[str]
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


ToCore = EngineRequest | Abort | ResetPrefixCache | Stop
FromCore = EngineOutputs | Phase | Ready | Failed
