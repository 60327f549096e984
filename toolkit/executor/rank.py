"""A rank in its own process: `python -m toolkit.executor.rank DESCRIPTOR`, or a Ray actor."""

from __future__ import annotations

import gc
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
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import ToolkitError
from toolkit.executor.channel import SocketChannel
from toolkit.executor.rank_failures import cause_of
from toolkit.executor.rank_messages import (
    Broken,
    Call,
    Constrain,
    DoOperation,
    Heartbeat,
    Log,
    OperationDone,
    Phase,
    RankReady,
    RankReply,
    RankStarted,
    Result,
    RunStep,
    StartRank,
    ToRank,
    decode_to_rank,
)
from toolkit.executor.rank_progress import HEARTBEAT_INTERVAL
from toolkit.hardware.parent import exit_with_parent
from toolkit.imports import without_collection
from toolkit.logs import flush_stderr

if TYPE_CHECKING:
    from toolkit.worker.pending import PendingOutput

ORPHAN_TIMEOUT = 2.0  # seconds that a rank gets to end by itself when its engine is gone


class RankProcess:
    """Executes the engine's messages in order. Only one rank returns results: all have the same."""

    def __init__(self, channel: SocketChannel, far: bool = False) -> None:
        """`far`: on another machine, so that log lines must be forwarded."""
        self._channel, self._is_remote = channel, far
        self._rank = 0
        self._steps = 0
        self._busy = True  # True during start-up and steps
        self._received: queue.SimpleQueue[bytearray | None] = queue.SimpleQueue()
        """Messages from another machine. None: the other end is gone."""

    def run(self) -> bool:
        """Serve until the engine ends this rank, or is gone. Return True if it ended it.

        Errors are reported to the engine only."""
        if self._is_remote:
            threading.Thread(target=self._receive_all, daemon=True, name="hear").start()
        return self._report_errors(self._serve)

    def _receive_all(self) -> None:
        """Read messages while steps compute: TCP drops an end that does not read for seconds."""
        try:
            while True:
                self._received.put(self._channel.receive())
        except EOFError:
            self._received.put(None)

    def _report_errors(self, work: Callable[[], None]) -> bool:
        """Run `work` and report its error to the engine. Return True if there was none."""
        try:
            work()
            return True
        except ToolkitError as error:
            self._channel.send(Broken(self._rank, type(error).__name__, error.message))
        except EOFError:
            pass  # the engine is gone
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            self._channel.send(
                Broken(self._rank, "", told, traceback.format_exc(), cause_of(error))
            )
        return False

    def _receive(self) -> ToRank:
        data = self._received.get() if self._is_remote else self._channel.receive()
        if data is None:
            raise EOFError
        return decode_to_rank(data)

    def _serve(self) -> None:
        begin = self._receive()
        assert isinstance(begin, StartRank)
        self._rank = begin.rank
        if self._is_remote:
            _log_to(self._channel, begin)
        else:
            begin.log.apply()
        threading.Thread(target=self._send_heartbeats, daemon=True, name="beat").start()

        with without_collection():
            from toolkit.executor.rank_devices import report
            from toolkit.worker.worker import Worker

        self._channel.send(RankStarted(begin.rank, report(begin.config.device.device, begin.rank)))
        rendezvous = begin.rendezvous if "://" in begin.rendezvous else Path(begin.rendezvous)
        worker = Worker(
            begin.config, Path(begin.folder), begin.rank, rendezvous, begin.num_local_ranks
        )
        info = worker.start(self._report)
        gc.collect()
        gc.freeze()  # as the core does
        self._channel.send(RankReady(begin.rank, info))
        deliver = self._deliverer() if begin.rank == begin.config.parallel.output_rank else None
        unsampled: deque[tuple[int, PendingOutput]] = deque()
        while True:
            self._busy = False
            message = self._receive()
            self._busy = True
            if isinstance(message, RunStep):
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
                self._channel.send(RankReply(begin.rank, value))
            elif isinstance(message, DoOperation):
                doing = worker.operate(message.operation)
                doing.add_done_callback(partial(self._report_operation, message.number))
            else:
                return

    def _report_operation(self, number: int, done: Future[None]) -> None:
        error = done.exception()
        message = OperationDone(self._rank, number)
        if isinstance(error, ToolkitError):
            message.kind, message.error = type(error).__name__, error.message
        elif error is not None:
            message.error = f"{type(error).__name__}: {error}"
        self._channel.send(message)

    def _report(self, phase: str, seconds: float) -> None:
        self._channel.send(Phase(self._rank, phase, seconds))

    def _deliverer(self) -> Callable[[PendingOutput], None]:
        """Return a function that sends the results of steps in order, in a thread."""
        import torch

        steps: queue.SimpleQueue[PendingOutput] = queue.SimpleQueue()
        begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # untyped in torch
        device = torch.cuda.current_device() if begun else None

        def deliver() -> None:
            if device is not None:
                torch.cuda.set_device(device)  # each thread has its own
            while True:
                self._channel.send(Result(self._rank, steps.get().result()))

        threading.Thread(
            target=self._report_errors, args=(deliver,), daemon=True, name="deliver"
        ).start()
        return steps.put

    def _send_heartbeats(self) -> None:
        """Send heartbeats while busy, and exit when the engine is gone. Runs in its own thread."""
        told = 0
        while True:
            time.sleep(HEARTBEAT_INTERVAL)
            if not self._busy and told == self._steps:
                continue
            told = self._steps
            if not self._channel.send(Heartbeat(self._rank, told)):
                time.sleep(ORPHAN_TIMEOUT)
                os._exit(1)


class _Forward(logging.Handler):
    """Forwards log records: all of rank 0, and the warnings of other ranks."""

    def __init__(self, channel: SocketChannel, rank: int) -> None:
        super().__init__(logging.WARNING if rank else logging.NOTSET)
        self._channel, self._rank = channel, rank

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._channel.send(Log(self._rank, record.name, record.levelno, self.format(record)))
        except Exception:
            self.handleError(record)


def _log_to(channel: SocketChannel, begin: StartRank) -> None:
    ours = logging.getLogger("toolkit")
    ours.setLevel(begin.log.level.upper())
    ours.addHandler(_Forward(channel, begin.rank))
    ours.propagate = False


def main() -> None:
    # Signals are for the server's first process; this one ends with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    exit_with_parent()
    RankProcess(SocketChannel(socket.socket(fileno=int(sys.argv[1])))).run()
    flush_stderr()
    os._exit(0)  # the rest of the process group may wait for lost ranks


if __name__ == "__main__":
    main()
