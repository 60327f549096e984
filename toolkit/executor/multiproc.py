"""One worker for each rank, in processes of their own; on one machine the first is in the engine's."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from toolkit.config import EngineConfig
from toolkit.errors import ToolkitError, WorkersLostError
from toolkit.executor import rank_devices as devices
from toolkit.executor.base import Executor, Pending
from toolkit.executor.rank_failures import as_error, blamed, cause_of, describe
from toolkit.executor.rank_messages import (
    Answer,
    Beat,
    Broken,
    Call,
    Cause,
    Constrain,
    End,
    Here,
    Log,
    Phase,
    Result,
    Running,
    Step,
    decode_from_rank,
    encode,
)
from toolkit.executor.rank_progress import Progress
from toolkit.executor.ranks import Rank, Ranks
from toolkit.sampling.grammar import Masks
from toolkit.scheduler import ModelOutput, SchedulerOutput
from toolkit.worker import Report
from toolkit.worker.worker import Worker

logger = logging.getLogger(__name__)
T = TypeVar("T")

GRACE = 1.0
"""Seconds from the first sign of a rank's end in which the others' words are awaited: the first to speak need not be the one
that knows."""
LOOK = 0.5
"""Seconds between looks at whether a step takes too long."""

OnFailure = Callable[[str, str], None]
"""Told the ToolkitError class (or "") and the message of what ended a rank, when this process cannot be relied on to go on."""


class MultiprocExecutor(Executor):
    """Every rank gets the same messages in the same order, and one of them delivers what a step gave.

    When a rank ends, or a step takes longer than `--worker-timeout`, no rank can go on: the step raises WorkersLostError. Where the
    process may be stuck in a collective that never ends, `on_failure` is called from another thread.
    """

    def __init__(
        self,
        config: EngineConfig,
        folder: Path,
        report: Report,
        ranks: Ranks,
        on_failure: OnFailure | None = None,
    ) -> None:
        """`ranks`: those that have processes of their own; they are ended with this."""
        self._timeout, self._on_failure = config.parallel.worker_timeout, on_failure
        self._delivering = config.parallel.delivering_rank
        self._lock = threading.Lock()
        self._broken: list[Broken] = []
        self._asking: set[int] = set()
        """Ranks that are gone, while it is found out how."""
        self._over = threading.Event()
        """Nothing more is expected of the ranks: the end was asked for, or has been told."""
        self._answers: queue.SimpleQueue[Answer | Here | Phase | Running] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[ModelOutput | None] = queue.SimpleQueue()
        """Of another process, in the order of steps; None when a rank has ended."""
        self._busy_since: float | None = None
        """When this thread began to wait for a step."""
        self._steps = 0
        self._runs = False
        """Whether all ranks have started."""
        self._started, self._ranks = ranks, ranks.others
        self._names = {0: "rank 0"} | {rank.rank: rank.name for rank in self._ranks}
        self._progress = Progress(rank.rank for rank in self._ranks)
        self._worker: Worker | None = None
        """The first rank's, when that is in this process."""
        self._listeners = [
            threading.Thread(
                target=self._listen, args=(rank,), daemon=True, name=f"rank-{rank.rank}"
            )
            for rank in self._ranks
        ]
        for listener in self._listeners:
            listener.start()
        try:
            told = {here.rank: here.device for here in self._await(Here)}
            first_is_here = 0 not in told
            if first_is_here:
                told = {0: devices.report(config.device.device, 0)} | told
            devices.require_alike({self._names[rank]: device for rank, device in told.items()})
            if first_is_here:
                self._worker = Worker(config, folder, 0, ranks.meeting)
                self.info = self._worker.start(report)
            running = self._await(Running, report)
            if self._worker is None:
                self.info = running[0].info
        except Exception as error:
            lost = self._lost(error)
            self.shutdown()
            raise lost from None
        except BaseException:
            self.shutdown()
            raise
        threading.Thread(target=self._watch, daemon=True, name="rank-watch").start()
        self._runs = True

    def execute(self, step: SchedulerOutput) -> Pending:
        self.check_health()
        worker = self._worker
        self._steps += 1
        pending = self._guarded(
            lambda: worker.execute(step) if worker else None, encode(Step(step))
        )
        return _Guarded(self, step.step, pending)

    def collective(self, method: str, *args: Any) -> list[Any]:
        self.check_health()
        call = encode(Call(method, list(args)))
        worker = self._worker
        own = self._guarded(lambda: [getattr(worker, method)(*args)] if worker else [], call)
        return [*own, *(answer.value for answer in self._await(Answer))]

    def check_health(self) -> None:
        if not self._ranks:
            raise RuntimeError("the executor was shut down")
        if self._broken:
            raise WorkersLostError(self._words(self._blamed()))

    def shutdown(self) -> None:
        if not self._ranks:
            return
        self._over.set()
        if not self._broken:
            self._send(encode(End()))
        healthy = not self._broken
        deadline = time.monotonic() + 5
        for rank in self._ranks:
            rank.end(max(0.1, deadline - time.monotonic()) if healthy else 0.1)
        self._ranks = []
        try:
            if self._worker is not None:
                self._worker.close(lost=bool(self._broken) or not self._runs)
        finally:
            self._worker = None
            self._started.close()
            for listener in self._listeners:
                listener.join(5)

    def constrain(self, step: int, pending: Pending | None, masks: Masks) -> None:
        """Lets a step sample, wherever it does."""
        self._guarded(
            lambda: None if pending is None else pending.constrain(masks),
            encode(Constrain(step, masks)),
        )

    def result(self, step: int, pending: Pending | None) -> ModelOutput:
        """What a step gave; `pending`: of this process's worker."""
        if pending is not None and self._delivering == 0:
            return self._guarded(pending.result)
        return self._guarded(lambda: self._delivered(step))

    def _delivered(self, step: int) -> ModelOutput:
        """Leaves out what came of steps before it, which nobody wants any more."""
        while not self._broken:
            output = self._results.get()
            if output is not None and output.step == step:
                return output
        raise WorkersLostError("a rank has ended")

    def _guarded(self, call: Callable[[], T], told: bytes | None = None) -> T:
        """What it gives, after the ranks are told. What it raises becomes the loss of the ranks, since the others may be at another
        point by now.
        """
        self._busy_since = time.monotonic()
        try:
            if told is not None:
                self._send(told)
            value = call()
            if self._broken:  # what a step gave that was let go means nothing
                raise WorkersLostError("a rank has ended")
            return value
        except Exception as error:
            raise self._lost(error) from error
        except BaseException:  # Ctrl-C: the others go on with the step
            self._broken.append(Broken(0, "", "was interrupted in the middle of a step"))
            raise
        finally:
            self._busy_since = None

    def _send(self, message: bytes) -> None:
        """An end that is gone is noticed where it is received from."""
        for rank in self._ranks:
            rank.channel.send_bytes(message)

    def _await(
        self, kind: type[Answer | Here | Running], report: Report | None = None
    ) -> list[Any]:
        """A message of this kind from each rank, in rank order. `report` is told of the first rank's start-up.

        Raises WorkersLostError when one ends first.
        """
        found: list[Any] = []
        while len(found) < len(self._ranks):
            try:
                message = self._answers.get(timeout=LOOK)
            except queue.Empty:
                if self._broken:
                    raise WorkersLostError("a rank has ended") from None
                continue
            if isinstance(message, kind):
                found.append(message)
            elif isinstance(message, Phase) and message.rank == 0 and report is not None:
                report(message.name, message.seconds)
        return sorted(found, key=lambda message: message.rank)

    def _listen(self, rank: Rank) -> None:
        """Hears a rank to its end. A thread of its own."""
        while True:
            try:
                message = decode_from_rank(rank.channel.receive())
            except EOFError:
                if self._over.is_set():
                    return
                self._asking.add(rank.rank)
                how = f"ended without a word ({rank.how_ended()})"
                message = Broken(rank.rank, "", how, cause=Cause.KILLED)
            match message:
                case Result():
                    self._results.put(message.output)
                case Beat():
                    self._progress.note(message)
                case Log():
                    logging.getLogger(message.logger).log(
                        message.level, "%s: %s", rank.name, message.text
                    )
                case Broken():
                    self._broke(message)
                    return
                case _:
                    self._answers.put(message)

    def _watch(self) -> None:
        """Looks for steps that never end. A thread of its own."""
        while not self._over.wait(LOOK):
            since = self._busy_since
            if since is None or time.monotonic() - since < self._timeout:
                continue
            behind = self._progress.behind(self._steps) or [self._delivering]
            others = f", nor have ranks {behind[1:]}" if behind[1:] else ""
            what = f"has not finished step {self._steps} in {self._timeout:g} s{others}"
            self._broke(Broken(behind[0], "", what, cause=Cause.HUNG))
            return

    def _broke(self, broken: Broken) -> None:
        with self._lock:
            self._broken.append(broken)
            self._asking.discard(broken.rank)
            first = len(self._broken) == 1
        self._results.put(None)
        if self._over.is_set() or not first:
            return
        if not self._over.wait(GRACE):  # else this process has noticed by itself
            told = self._blamed()
            for rank in self._ranks:
                rank.kill()  # between CPUs this wakes a rank that waits for them
            if self._on_failure is not None:
                self._on_failure(told.kind, self._words(told))
            elif self._worker is not None:
                self._worker.abandon()

    def _lost(self, error: Exception) -> Exception:
        """What to raise for an error here: what the ranks say of it, if it is that one of them is gone."""
        if isinstance(error, ToolkitError):
            return error
        if self._ranks and not self._broken:
            deadline = time.monotonic() + GRACE
            while not self._broken and time.monotonic() < deadline:
                time.sleep(0.02)
        time.sleep(0.2 if self._broken else 0.0)  # for those that know more than the first
        deadline = time.monotonic() + GRACE
        while self._asking and time.monotonic() < deadline:
            time.sleep(0.02)
        self._over.set()
        if not self._broken:
            logger.error("rank 0 ended", exc_info=error)
            self._broken.append(
                Broken(0, "", f"{type(error).__name__}: {error}", cause=cause_of(error))
            )  # the others are at another point
            return WorkersLostError(f"rank 0: {type(error).__name__}: {error}")
        told = self._blamed()
        if told.traceback:
            logger.error("%s ended:\n%s", self._names[told.rank], told.traceback)
        return as_error(told, self._names[told.rank])

    def _blamed(self) -> Broken:
        with self._lock:
            return blamed(self._broken)

    def _words(self, broken: Broken) -> str:
        return describe(broken, self._names[broken.rank])


class _Guarded:
    """A step under way on all ranks."""

    def __init__(self, executor: MultiprocExecutor, step: int, pending: Pending | None) -> None:
        self._executor, self._step, self._pending = executor, step, pending

    def result(self) -> ModelOutput:
        return self._executor.result(self._step, self._pending)

    def constrain(self, masks: Masks) -> None:
        self._executor.constrain(self._step, self._pending, masks)
