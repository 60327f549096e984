"""Messages between front ends and engine cores: msgspec structs, sent as MessagePack."""

import msgspec

from toolkit.config import EngineConfig
from toolkit.scheduler.stats import EngineStats
from toolkit.sequence import SequenceSpec
from toolkit.worker import WorkerInfo
from toolkit.worker.operations import Operation


class EngineRequest(msgspec.Struct, kw_only=True, tag="add"):
    """A request and how its answers are delivered.

    The client (a front end) and a number identify each of its n sequences: `number` and the n - 1
    numbers after it. A front end uses each number once."""

    id: str
    spec: SequenceSpec
    client: int = 0
    number: int = 0
    seed: int | None = None  # of the first sequence, if the front end has drawn one
    arrival: float = 0.0  # on the machine's monotonic clock
    origin: str = ""  # address of the HTTP client
    index: int | None = None  # compute only this one of the n answers. None: all n
    output_token_ids: list[int] = []
    """Tokens of sequence `index` that a core generated before it died."""
    num_prompt_logprobs: int = 0  # prompt positions whose log-probabilities that core had reported

    @property
    def num_sequences(self) -> int:
        return self.spec.params.n if self.index is None else 1


class Abort(msgspec.Struct, tag="abort"):
    """Sequences to end."""

    numbers: list[int]
    client: int = 0


class ClientGone(msgspec.Struct, tag="client_gone"):
    """A front end has exited. Its sequences end, and their output is dropped."""

    client: int


class ResetPrefixCache(msgspec.Struct, tag="reset"):
    """Evict all cached blocks. The core answers all front ends with PrefixCacheCleared."""


class StepProbe(msgspec.Struct, tag="step_probe"):
    """Request a StepReport after the next step. An idle core runs a step for it."""

    client: int


class Ping(msgspec.Struct, tag="ping"):
    """Check that the core's loop is alive, without a step. Sent by the first front end."""


class ListRequests(msgspec.Struct, tag="list"):
    """Request a RequestList of all live requests, with the same ticket."""

    client: int
    ticket: int


class EndRequests(msgspec.Struct, tag="end"):
    """End all requests with this id, of any client, and return them as a RequestList."""

    id: str
    client: int
    ticket: int


class Operate(msgspec.Struct, tag="operate"):
    """Do an operation. The core answers with an OperationResult that has the ticket."""

    operation: Operation
    client: int
    ticket: int


class GiveFeature(msgspec.Struct, tag="feature"):
    """Answer to NeedFeature. The next frame has the bytes, unless the front end has none."""

    digest: bytes
    client: int
    is_found: bool
    error: str = ""  # why it could not be loaded


class Stop(msgspec.Struct, tag="stop"):
    """Shut the process down."""


class LogprobRecords(msgspec.Struct, array_like=True):
    """Log-probabilities at consecutive positions: records (`kernels.logprobs`), joined."""

    size: int  # bytes of one
    data: bytes

    def split(self) -> list[bytes]:
        """Return each record."""
        size, data = self.size, self.data
        return [data[at : at + size] for at in range(0, len(data), size)]


class EngineOutput(msgspec.Struct, array_like=True, omit_defaults=True):
    """A sequence's result of a step: its first token, its end, the prompt or an error."""

    number: int
    token_ids: list[int]  # new ones; with is_final_only, all
    finish_reason: str | None = None
    stop_reason: int | None = None
    logprobs: LogprobRecords | None = None
    prompt_logprobs: LogprobRecords | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    error: str | None = None
    num_accepted_drafts: int = 0  # of the whole sequence, at its end
    num_rejected_drafts: int = 0
    embedding: bytes = b""  # float32 vector of a pooled prompt
    adapter_failed: bool = False  # its LoRA adapter could not be read, as `error` says


class EngineOutputs(msgspec.Struct, tag="outputs"):
    """Results of one step for one front end."""

    outputs: list[EngineOutput] = []
    numbers: bytes = b""  # int64 numbers of the sequences that got one token and nothing else
    token_ids: bytes = b""  # int32 token of each of them
    logprobs: LogprobRecords | None = None
    """One record for each of them, with as many tokens as the step's most demanding sequence wants.
    None if no sequence of the step wants any."""
    stats: EngineStats | None = None  # only for the first front end
    scheduled: list[int] = []  # sequences that started to run in this step
    scheduled_at: float = 0.0
    """Start time of those sequences on the monotonic clock, which all processes share."""


class StepReport(msgspec.Struct, tag="step_report"):
    """A step has run since the StepProbe. `error`: the reason if it failed."""

    error: str | None = None


class Pong(msgspec.Struct, tag="pong"):
    """Answer to Ping."""


class PrefixCacheCleared(msgspec.Struct, tag="prefix_cache_cleared"):
    """All cached blocks are evicted. Sent to every front end."""


class RequestInfo(msgspec.Struct):
    """A live request with all of its n sequences. Times in seconds."""

    id: str
    state: str
    age: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    tokens_per_second: float  # output tokens over the time since it first ran
    num_blocks: int
    num_preemptions: int
    priority: int
    origin: str  # address of the client
    n: int = 1
    adapter: str = ""  # name of the LoRA adapter
    model: str = ""  # name of the model, once the server knows it


class RequestList(msgspec.Struct, tag="requests"):
    """Answer to ListRequests and EndRequests."""

    ticket: int
    requests: list[RequestInfo]
    kv_cache_usage: float  # 0 to 1


class OperationResult(msgspec.Struct, tag="operated"):
    """Answer to Operate, when all ranks have done it or one has failed."""

    ticket: int
    error: str = ""


class NeedFeature(msgspec.Struct, tag="need_feature"):
    """A request waits for the bytes of its feature. The front end answers with GiveFeature."""

    digest: bytes


class StartupPhase(msgspec.Struct, tag="phase"):
    """A phase of start-up is complete."""

    name: str
    seconds: float


class Ready(msgspec.Struct, tag="ready"):
    """The core accepts requests."""

    info: WorkerInfo


class Failed(msgspec.Struct, tag="failed"):
    """The core ends with an error.

    `kind` is the name of a ToolkitError class. It is empty for a bug, whose traceback is in the
    log."""

    kind: str
    message: str


class StartCore(msgspec.Struct):
    """Load the model. A core process gets its LogStyle first, and imports its modules then."""

    config: EngineConfig
    folder: str


ToCore = (
    EngineRequest
    | Abort
    | ClientGone
    | ResetPrefixCache
    | ListRequests
    | EndRequests
    | StepProbe
    | Ping
    | Operate
    | GiveFeature
    | Stop
)
FromCore = (
    EngineOutputs
    | RequestList
    | OperationResult
    | PrefixCacheCleared
    | NeedFeature
    | StartupPhase
    | Ready
    | StepReport
    | Pong
    | Failed
)
