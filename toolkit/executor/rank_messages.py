"""What the engine's process and the ranks tell each other: MessagePack, in which arrays are their type, shape and bytes."""

from __future__ import annotations

import enum
from typing import Any

import msgspec
import numpy as np

from toolkit.config import EngineConfig
from toolkit.executor.rank_devices import DeviceReport
from toolkit.logs import LogStyle
from toolkit.scheduler import ModelOutput, SchedulerOutput
from toolkit.worker import WorkerInfo


class Begin(msgspec.Struct, tag=True):
    """To a new process: what to load. The ranks meet in `meeting`: a folder, or tcp://HOST:PORT."""

    config: EngineConfig
    folder: str
    meeting: str
    rank: int
    log: LogStyle
    beside: int = 0
    """Ranks that share this one's machine, itself included; 0: all of all engines."""


class Step(msgspec.Struct, tag=True):
    """The same for every rank."""

    output: SchedulerOutput


class Constrain(msgspec.Struct, tag=True):
    """Masks of a step that waits for them; older ones that wait will get none."""

    step: int
    masks: np.ndarray[Any, Any]


class Call(msgspec.Struct, tag=True):
    """Of a method of the worker, with arguments that MessagePack knows."""

    method: str
    arguments: list[Any]


class End(msgspec.Struct, tag=True):
    """No more is to come."""


ToRank = Begin | Step | Constrain | Call | End


class Here(msgspec.Struct, tag=True):
    """A rank's process has begun, and goes to the meeting."""

    rank: int
    device: DeviceReport


class Phase(msgspec.Struct, tag=True):
    """A part of a rank's start-up is done."""

    rank: int
    name: str
    seconds: float


class Running(msgspec.Struct, tag=True):
    """A rank has loaded its part."""

    rank: int
    info: WorkerInfo


class Answer(msgspec.Struct, tag=True):
    """To a Call."""

    rank: int
    value: Any


class Result(msgspec.Struct, tag=True):
    """What a step gave, of the rank that delivers."""

    rank: int
    output: ModelOutput


class Beat(msgspec.Struct, tag=True):
    """A sign of life, while there is something to do: how many steps a rank has done."""

    rank: int
    steps: int


class Log(msgspec.Struct, tag=True):
    """A line for the log of the engine's process, of a rank that has none there."""

    rank: int
    logger: str
    level: int
    text: str


class Cause(enum.StrEnum):
    """Why a rank ended. The order is that of blame: the first is the most likely root cause."""

    KILLED = "killed"
    """Its process ended without a report."""
    HUNG = "hung"
    """It did not finish a step in time."""
    FAILED = "failed"
    """It met an error of its own."""
    LOST_PEER = "lost_peer"
    """It missed another rank."""


class Broken(msgspec.Struct, tag=True):
    """A rank ends. `kind` is the class of the ToolkitError that it met, or empty for a bug."""

    rank: int
    kind: str
    message: str
    traceback: str = ""
    cause: Cause = Cause.FAILED


FromRank = Here | Phase | Running | Answer | Result | Beat | Log | Broken


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
