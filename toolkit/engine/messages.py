"""What front end and engine core tell each other: msgspec structs, sent as MessagePack."""

from __future__ import annotations

import msgspec

from toolkit.config import EngineConfig
from toolkit.logs import LogStyle
from toolkit.scheduler.stats import EngineStats
from toolkit.sequence import SequenceSpec
from toolkit.worker import WorkerInfo


class EngineRequest(msgspec.Struct, kw_only=True, tag="add"):
    """A request for the core: what is asked, and how its answers are delivered.

    The client (a front end) and a number identify each of its n sequences: `number` and the n - 1
    that follow. No front end uses a number twice.
    """

    id: str
    spec: SequenceSpec
    client: int = 0
    number: int = 0
    seed: int | None = None
    """Seed of the first sequence, if the front end has drawn one."""
    arrival: float = 0.0
    """On the machine's monotonic clock."""
    origin: str = ""
    """Address of the HTTP client."""
    index: int | None = None
    """The only one of the n answers to compute: the others are elsewhere. None: all n."""
    output_token_ids: list[int] = []
    """Tokens that the sequence `index` already has, from a core that died."""
    num_prompt_logprobs: int = 0
    """Prompt positions whose log-probabilities that core had reported."""

    @property
    def num_sequences(self) -> int:
        """Sequences that this message asks for."""
        return self.spec.params.n if self.index is None else 1


class Abort(msgspec.Struct, tag="abort"):
    """Sequences to end, by number."""

    numbers: list[int]
    client: int = 0


class Leave(msgspec.Struct, tag="leave"):
    """A front end is gone: its sequences end, and what still comes of it is dropped."""

    client: int


class ResetPrefixCache(msgspec.Struct, tag="reset"):
    """Forget all cached content."""


class Ping(msgspec.Struct, tag="ping"):
    """Say that a step has run; an idle core runs one for this."""

    client: int


class Knock(msgspec.Struct, tag="knock"):
    """From the first front end: say that the loop goes round. It costs an idle core no step."""


class ListRequests(msgspec.Struct, tag="list"):
    """Tell of every request. The answer has the same ticket."""

    client: int
    ticket: int


class EndRequests(msgspec.Struct, tag="end"):
    """End the requests with this id, whoever asked for them, and tell which."""

    id: str
    client: int
    ticket: int


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
    embedding: bytes = b""
    """What a pooled prompt has become: float32 each."""


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


class Pong(msgspec.Struct, tag="pong"):
    """A step has run since the Ping; `error`: it failed."""

    error: str | None = None


class Alive(msgspec.Struct, tag="alive"):
    """The answer to Knock."""


class Forgotten(msgspec.Struct, tag="forgotten"):
    """Nothing is cached any more, whoever asked for that."""


class RequestInfo(msgspec.Struct):
    """A live request, its n sequences together. Times in seconds."""

    id: str
    state: str
    age: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    tokens_per_second: float
    """Output tokens over the time since it first ran."""
    num_blocks: int
    num_preemptions: int
    priority: int
    origin: str
    """The address that it came from."""
    n: int = 1


class RequestList(msgspec.Struct, tag="requests"):
    """The answer to ListRequests and EndRequests."""

    ticket: int
    requests: list[RequestInfo]
    kv_cache_usage: float
    """0 to 1."""


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
    log: LogStyle


ToCore = (
    EngineRequest
    | Abort
    | Leave
    | ResetPrefixCache
    | ListRequests
    | EndRequests
    | Ping
    | Knock
    | Stop
)
FromCore = EngineOutputs | RequestList | Forgotten | Phase | Ready | Pong | Alive | Failed
