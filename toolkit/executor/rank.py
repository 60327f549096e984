"""A rank in a process of its own: `python -m toolkit.executor.rank DESCRIPTOR`, started with one end of a socket, or an actor of Ray."""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import ToolkitError
from toolkit.executor.channel import Channel
from toolkit.executor.rank_failures import cause_of
from toolkit.executor.rank_messages import (
    Answer,
    Beat,
    Begin,
    Broken,
    Call,
    Constrain,
    Here,
    Log,
    Phase,
    Result,
    Running,
    Step,
    ToRank,
    decode_to_rank,
)
from toolkit.executor.rank_progress import BEAT
from toolkit.hardware.parent import end_with_parent

if TYPE_CHECKING:
    from toolkit.worker.model_runner import PendingOutput

ORPHAN = 2.0
"""Seconds that a rank gets to end by itself when nobody hears it any more."""


class RankProcess:
    """Applies what the engine's process sends, in order. Only one rank tells what a step gave: the others know as much."""

    def __init__(self, channel: Channel, far: bool = False) -> None:
        """`far`: what this process writes to its log is not seen where the engine's is."""
        self._channel, self._far = channel, far
        self._rank = 0
        self._steps = 0
        self._busy = True
        """Whether a step is under way, or the start-up."""
        self._heard: queue.SimpleQueue[bytearray | None] = queue.SimpleQueue()
        """What has come from far; None: the other end is gone."""

    def run(self) -> bool:
        """Until the other end says so, or is gone: whether it said so. What ends it otherwise is told there, and nowhere else."""
        if self._far:
            threading.Thread(target=self._hear, daemon=True, name="hear").start()
        return self._told(self._serve)

    def _hear(self) -> None:
        """Takes in what comes while a step computes, too: TCP gives up an end that has not read for seconds."""
        try:
            while True:
                self._heard.put(self._channel.receive())
        except EOFError:
            self._heard.put(None)

    def _told(self, work: Callable[[], None]) -> bool:
        """Whether the work came to its end."""
        try:
            work()
            return True
        except ToolkitError as error:
            self._channel.send(Broken(self._rank, type(error).__name__, error.message))
        except EOFError:
            pass  # whoever started this is gone
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            self._channel.send(
                Broken(self._rank, "", told, traceback.format_exc(), cause_of(error))
            )
        return False

    def _receive(self) -> ToRank:
        data = self._heard.get() if self._far else self._channel.receive()
        if data is None:
            raise EOFError
        return decode_to_rank(data)

    def _serve(self) -> None:
        begin = self._receive()
        assert isinstance(begin, Begin)
        self._rank = begin.rank
        if self._far:
            _log_to(self._channel, begin)
        else:
            begin.log.apply()
        threading.Thread(target=self._beat, daemon=True, name="beat").start()

        from toolkit.executor.rank_devices import report
        from toolkit.worker.worker import Worker

        self._channel.send(Here(begin.rank, report(begin.config.device.device, begin.rank)))
        meeting = begin.meeting if "://" in begin.meeting else Path(begin.meeting)
        worker = Worker(begin.config, Path(begin.folder), begin.rank, meeting, begin.beside)
        self._channel.send(Running(begin.rank, worker.start(self._report)))
        deliver = self._deliverer() if begin.rank == begin.config.parallel.delivering_rank else None
        unsampled: deque[tuple[int, PendingOutput]] = deque()
        while True:
            self._busy = False
            message = self._receive()
            self._busy = True
            if isinstance(message, Step):
                pending = worker.execute(message.output)
                if len(message.output.constrained):
                    unsampled.append((message.output.step, pending))
                elif deliver is not None:
                    deliver(pending)
                self._steps += 1
            elif isinstance(message, Constrain):
                while unsampled[0][0] != message.step:
                    unsampled.popleft()
                _, pending = unsampled.popleft()
                pending.constrain(message.masks)
                if deliver is not None:
                    deliver(pending)
            elif isinstance(message, Call):
                value = getattr(worker, message.method)(*message.arguments)
                self._channel.send(Answer(begin.rank, value))
            else:
                return

    def _report(self, phase: str, seconds: float) -> None:
        self._channel.send(Phase(self._rank, phase, seconds))

    def _deliverer(self) -> Callable[[PendingOutput], None]:
        """What takes steps under way, in order, and sends what each gave; meanwhile the next one can be launched."""
        import torch

        steps: queue.SimpleQueue[PendingOutput] = queue.SimpleQueue()
        begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        device = torch.cuda.current_device() if begun else None

        def deliver() -> None:
            if device is not None:
                torch.cuda.set_device(device)  # each thread has its own
            while True:
                self._channel.send(Result(self._rank, steps.get().result()))

        threading.Thread(target=self._told, args=(deliver,), daemon=True, name="deliver").start()
        return steps.put

    def _beat(self) -> None:
        """Tells of life while there is something to do, and ends the process when nobody hears it. A thread of its own."""
        told = 0
        while True:
            time.sleep(BEAT)
            if not self._busy and told == self._steps:
                continue
            told = self._steps
            if not self._channel.send(Beat(self._rank, told)):
                time.sleep(ORPHAN)
                os._exit(1)


class _Forward(logging.Handler):
    """A log over the channel: all that the first rank has to say, and the warnings of the others."""

    def __init__(self, channel: Channel, rank: int) -> None:
        super().__init__(logging.WARNING if rank else logging.NOTSET)
        self._channel, self._rank = channel, rank

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._channel.send(Log(self._rank, record.name, record.levelno, self.format(record)))
        except Exception:
            self.handleError(record)


def _log_to(channel: Channel, begin: Begin) -> None:
    ours = logging.getLogger("toolkit")
    ours.setLevel(begin.log.level.upper())
    ours.addHandler(_Forward(channel, begin.rank))
    ours.propagate = False


def main() -> None:
    # Who asks a server to end asks its first process; this one ends with that.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()
    RankProcess(Channel(socket.socket(fileno=int(sys.argv[1])))).run()
    os._exit(0)  # what is left of the group of ranks may wait for others that are gone


if __name__ == "__main__":
    main()
