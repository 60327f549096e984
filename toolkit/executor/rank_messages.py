"""Messages between the engine's process and ranks: MessagePack, arrays as (type, shape, bytes)."""

import enum
from typing import Any

import msgspec
import numpy as np

from toolkit.config import EngineConfig
from toolkit.executor.rank_devices import DeviceReport
from toolkit.logs import LogStyle
from toolkit.scheduler import ModelOutput, SchedulerOutput
from toolkit.worker import WorkerInfo
from toolkit.worker.operations import Operation


class StartRank(msgspec.Struct, tag=True):
    """First message to a rank: what to load. `rendezvous`: a folder, or tcp://HOST:PORT."""

    config: EngineConfig
    folder: str
    rendezvous: str
    rank: int
    log: LogStyle
    num_local_ranks: int = 0
    """Ranks on this rank's machine, itself included. 0: all ranks of all engines."""


class RunStep(msgspec.Struct, tag=True):
    """Run a step. Every rank gets the same."""

    output: SchedulerOutput


class Constrain(msgspec.Struct, tag=True):
    """Masks for a step that waits for them. Older waiting steps get none."""

    step: int
    masks: np.ndarray[Any, Any]


class Call(msgspec.Struct, tag=True):
    """Call a method of the worker. Arguments are MessagePack values."""

    method: str
    arguments: list[Any]


class DoOperation(msgspec.Struct, tag=True):
    """Do an operation, and answer with OperationDone. Operations are numbered."""

    number: int
    operation: Operation


class EndRank(msgspec.Struct, tag=True):
    """End the process."""


ToRank = StartRank | RunStep | Constrain | Call | DoOperation | EndRank


class RankStarted(msgspec.Struct, tag=True):
    """A rank's process runs and is about to meet the others."""

    rank: int
    device: DeviceReport


class Phase(msgspec.Struct, tag=True):
    """A phase of a rank's start-up is done."""

    rank: int
    name: str
    seconds: float


class RankReady(msgspec.Struct, tag=True):
    """A rank has loaded its shard."""

    rank: int
    info: WorkerInfo


class RankReply(msgspec.Struct, tag=True):
    """Result of a Call."""

    rank: int
    value: Any


class OperationDone(msgspec.Struct, tag=True):
    """A rank has done an operation, or failed. `kind`: the class of its error; empty: a bug."""

    rank: int
    number: int
    kind: str = ""
    error: str | None = None


class Result(msgspec.Struct, tag=True):
    """Result of a step, from the rank that reports."""

    rank: int
    output: ModelOutput


class Heartbeat(msgspec.Struct, tag=True):
    """Sign of life of a busy rank: the number of steps it has done."""

    rank: int
    steps: int


class Log(msgspec.Struct, tag=True):
    """A log line of a rank on another machine."""

    rank: int
    logger: str
    level: int
    text: str


class Cause(enum.StrEnum):
    """Why a rank ended. The order is that of blame: the first is the most likely root cause."""

    KILLED = "killed"  # its process ended without a report
    HUNG = "hung"  # it did not finish a step in time
    FAILED = "failed"  # it met an error of its own
    LOST_PEER = "lost_peer"  # it missed another rank


class Broken(msgspec.Struct, tag=True):
    """A rank ends. `kind` is the class of the ToolkitError that it met, or empty for a bug."""

    rank: int
    kind: str
    message: str
    traceback: str = ""
    cause: Cause = Cause.FAILED


FromRank = (
    RankStarted | Phase | RankReady | RankReply | OperationDone | Result | Heartbeat | Log | Broken
)


def encode(message: ToRank | FromRank) -> bytes:
    return _ENCODER.encode(message)


def decode_to_rank(data: bytearray) -> ToRank:
    message: ToRank = _TO_RANK.decode(data)
    return message


def decode_from_rank(data: bytearray) -> FromRank:
    message: FromRank = _FROM_RANK.decode(data)
    return message


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes()
    raise NotImplementedError(f"no message holds a {type(value).__name__}")


def _array(kind: type, value: Any) -> Any:
    dtype, shape, data = value
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape).copy()


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_TO_RANK = msgspec.msgpack.Decoder(ToRank, dec_hook=_array)
_FROM_RANK = msgspec.msgpack.Decoder(FromRank, dec_hook=_array)
