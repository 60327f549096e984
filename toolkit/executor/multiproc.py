"""One worker per rank, in separate processes. On one machine, rank 0 is the engine's process.

Every rank gets the same encoded steps and masks and applies them to its own state. Those of the
last stage sample the same tokens from the same gathered logits, so only one of them returns
results, and sends them only if it is another process. All report the phases of their start-up, and
send heartbeats while they are busy."""

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from toolkit.config import EngineConfig
from toolkit.errors import PluginError, ToolkitError, WorkersLostError, error_of_kind
from toolkit.executor import rank_devices as devices
from toolkit.executor.base import Executor, Pending
from toolkit.executor.rank_failures import as_error, blamed, cause_of, describe
from toolkit.executor.rank_messages import (
    Broken,
    Call,
    Cause,
    Constrain,
    DoOperation,
    EndRank,
    Heartbeat,
    Log,
    OperationDone,
    Phase,
    RankReady,
    RankReply,
    RankStarted,
    Result,
    RunStep,
    decode_from_rank,
    encode,
)
from toolkit.executor.rank_progress import Progress
from toolkit.executor.ranks import Rank, Ranks
from toolkit.sampling.grammar import Masks
from toolkit.scheduler import ModelOutput, SchedulerOutput
from toolkit.worker import Report, WorkerInfo
from toolkit.worker.operations import Operation
from toolkit.worker.worker import Worker

logger = logging.getLogger(__name__)
T = TypeVar("T")

REPORT_GRACE = 1.0
"""Seconds to wait for reports of other ranks after one has ended: the first to report may not know
the cause."""
WATCH_INTERVAL = 0.5  # seconds between checks for steps that take too long

OnFailure = Callable[[str, str], None]
"""Called with the ToolkitError class (or "") and the message, when this process may be stuck."""


class MultiprocExecutor(Executor):
    """Sends every rank the same messages in the same order. One rank returns the results.

    When a rank ends, or a step takes longer than `--worker-timeout`, no rank can continue: the step
    raises WorkersLostError. If this process may be stuck in a collective, `on_failure` is called
    from another thread."""

    def __init__(
        self,
        config: EngineConfig,
        folder: Path,
        report: Report,
        ranks: Ranks,
        on_failure: OnFailure | None = None,
    ) -> None:
        """`ranks`: those with their own processes. They end with this object."""
        self._timeout, self._on_failure = config.parallel.worker_timeout, on_failure
        self._output_rank = config.parallel.output_rank
        self._lock = threading.Lock()
        self._broken: list[Broken] = []
        self._being_examined: set[int] = set()
        """Ended ranks whose cause of death is being looked up."""
        self._is_closing = threading.Event()
        """Set when the ranks end on request, or their failure is reported."""
        self._replies: queue.SimpleQueue[RankReply | RankStarted | Phase | RankReady] = (
            queue.SimpleQueue()
        )
        self._results: queue.SimpleQueue[ModelOutput | None] = queue.SimpleQueue()
        """Results from another process in step order. None: a rank has ended."""
        self._busy_since: float | None = None  # time at which this thread began to wait for a step
        self._steps = 0
        self._operations: dict[int, _Operation] = {}  # not done by all ranks
        self._operation_numbers = itertools.count()
        self._has_started = False  # True once all ranks have started
        self._started, self._ranks = ranks, ranks.others
        self._names = {0: "rank 0"} | {rank.rank: rank.name for rank in self._ranks}
        self._progress = Progress(rank.rank for rank in self._ranks)
        self._worker: Worker | None = None  # worker of rank 0, if it is in this process
        self._listeners = [
            threading.Thread(
                target=self._read_rank, args=(rank,), daemon=True, name=f"rank-{rank.rank}"
            )
            for rank in self._ranks
        ]
        for listener in self._listeners:
            listener.start()
        try:
            told = {here.rank: here.device for here in self._await(RankStarted)}
            first_is_here = 0 not in told
            if first_is_here:
                told = {0: devices.report(config.device.device, 0)} | told
            devices.require_alike({self._names[rank]: device for rank, device in told.items()})
            if first_is_here:
                self._worker = Worker(config, folder, 0, ranks.rendezvous)
                self.info = self._worker.start(report)
            running = self._await(RankReady, report)
            if self._worker is None:
                self.info = running[0].info
            _require_same_processors([self.info, *(rank.info for rank in running)])
        except Exception as error:
            lost = self._as_loss(error)
            self.shutdown()
            raise lost from None
        except BaseException:
            self.shutdown()
            raise
        threading.Thread(target=self._watch, daemon=True, name="rank-watch").start()
        self._has_started = True

    def execute(self, step: SchedulerOutput) -> Pending:
        self.check_health()
        worker = self._worker
        self._steps += 1
        pending = self._run_guarded(
            lambda: worker.execute(step) if worker else None, encode(RunStep(step))
        )
        return _Guarded(self, step.step, pending)

    def operate(self, operation: Operation) -> Future[None]:
        self.check_health()
        number = next(self._operation_numbers)
        doing = self._operations[number] = _Operation(len(self._ranks) + (self._worker is not None))
        worker, told = self._worker, encode(DoOperation(number, operation))
        own = self._run_guarded(lambda: worker.operate(operation) if worker else None, told)
        if own is not None:
            own.add_done_callback(lambda done: doing.count(done.exception()))
        doing.result.add_done_callback(lambda _: self._operations.pop(number))
        return doing.result

    def collective(self, method: str, *args: Any) -> list[Any]:
        self.check_health()
        call = encode(Call(method, list(args)))
        worker = self._worker
        own = self._run_guarded(lambda: [getattr(worker, method)(*args)] if worker else [], call)
        return [*own, *(answer.value for answer in self._await(RankReply))]

    def check_health(self) -> None:
        if not self._ranks:
            raise RuntimeError("the executor was shut down")
        if self._broken:
            raise WorkersLostError(self._describe(self._blamed()))

    def shutdown(self) -> None:
        if not self._ranks:
            return
        self._is_closing.set()
        if not self._broken:
            self._send(encode(EndRank()))
        is_reading = self._has_started and not self._broken  # else ranks may wait for each other
        deadline = time.monotonic() + 5
        for rank in self._ranks:
            rank.end(max(0.1, deadline - time.monotonic()) if is_reading else 0.1)
        self._ranks = []
        try:
            if self._worker is not None:
                self._worker.close(lost=bool(self._broken) or not self._has_started)
        finally:
            self._worker = None
            self._started.close()
            for listener in self._listeners:
                listener.join(5)

    def constrain(self, step: int, pending: Pending | None, masks: Masks) -> None:
        """Send masks to the ranks that sample."""
        self._run_guarded(
            lambda: None if pending is None else pending.constrain(masks),
            encode(Constrain(step, masks)),
        )

    def result(self, step: int, pending: Pending | None) -> ModelOutput:
        """Return the result of a step. `pending`: this process's part of it."""
        if pending is not None and self._output_rank == 0:
            return self._run_guarded(pending.result)
        return self._run_guarded(lambda: self._output_of(step))

    def _output_of(self, step: int) -> ModelOutput:
        """Return the result of a step, skipping older ones that were dropped."""
        while not self._broken:
            output = self._results.get()
            if output is not None and output.step == step:
                return output
        raise WorkersLostError("a rank has ended")

    def _run_guarded(self, call: Callable[[], T], told: bytes | None = None) -> T:
        """Send a message to the ranks, then make a call here and return its result.

        Its error counts as the loss of the ranks, which may be at another point by now."""
        self._busy_since = time.monotonic()
        try:
            if told is not None:
                self._send(told)
            value = call()
            if self._broken:  # the result of an abandoned step means nothing
                raise WorkersLostError("a rank has ended")
            return value
        except Exception as error:
            raise self._as_loss(error) from error
        except BaseException:  # Ctrl-C: the other ranks continue with the step
            self._broken.append(Broken(0, "", "was interrupted in the middle of a step"))
            raise
        finally:
            self._busy_since = None

    def _send(self, message: bytes) -> None:
        """Send to all ranks. A lost one is noticed by its reader thread."""
        for rank in self._ranks:
            rank.channel.send_bytes(message)

    def _await(
        self, kind: type[RankReply | RankStarted | RankReady], report: Report | None = None
    ) -> list[Any]:
        """Return a message of this kind from each rank, in rank order.

        `report` gets the phases of rank 0's start-up. Raises WorkersLostError if a rank ends first.
        """
        found: list[Any] = []
        while len(found) < len(self._ranks):
            try:
                message = self._replies.get(timeout=WATCH_INTERVAL)
            except queue.Empty:
                if self._broken:
                    raise WorkersLostError("a rank has ended") from None
                continue
            if isinstance(message, kind):
                found.append(message)
            elif isinstance(message, Phase) and message.rank == 0 and report is not None:
                report(message.name, message.seconds)
        return sorted(found, key=lambda message: message.rank)

    def _read_rank(self, rank: Rank) -> None:
        """Read a rank's messages until it ends. Runs in its own thread."""
        while True:
            try:
                message = decode_from_rank(rank.channel.receive())
            except EOFError:
                if self._is_closing.is_set():
                    return
                self._being_examined.add(rank.rank)
                how = f"ended unexpectedly ({rank.how_ended()})"
                message = Broken(rank.rank, "", how, cause=Cause.KILLED)
            match message:
                case Result():
                    self._results.put(message.output)
                case OperationDone():
                    if (doing := self._operations.get(message.number)) is not None:
                        doing.count(_error_of(message))
                case Heartbeat():
                    self._progress.note(message)
                case Log():
                    logging.getLogger(message.logger).log(
                        message.level, "%s: %s", rank.name, message.text
                    )
                case Broken():
                    self._note_broken(message)
                    return
                case _:
                    self._replies.put(message)

    def _watch(self) -> None:
        """Detect steps that never end. Runs in its own thread."""
        while not self._is_closing.wait(WATCH_INTERVAL):
            since = self._busy_since
            if since is None or time.monotonic() - since < self._timeout:
                continue
            behind = self._progress.behind(self._steps) or [self._output_rank]
            others = f", nor have ranks {behind[1:]}" if behind[1:] else ""
            what = f"has not finished step {self._steps} in {self._timeout:g} s{others}"
            self._note_broken(Broken(behind[0], "", what, cause=Cause.HUNG))
            return

    def _note_broken(self, broken: Broken) -> None:
        with self._lock:
            self._broken.append(broken)
            self._being_examined.discard(broken.rank)
            first = len(self._broken) == 1
        self._results.put(None)
        if self._is_closing.is_set() or not first:
            return
        if not self._is_closing.wait(REPORT_GRACE):  # else this process has noticed itself
            told = self._blamed()
            for rank in self._ranks:
                rank.kill()  # on CPUs this wakes ranks that wait for it
            if self._on_failure is not None:
                self._on_failure(told.kind, self._describe(told))
            elif self._worker is not None:
                self._worker.abandon()

    def _as_loss(self, error: Exception) -> Exception:
        """Return the error to raise here: that of a lost rank, if this one only follows from it."""
        if isinstance(error, ToolkitError):
            return error
        if self._ranks and not self._broken:
            deadline = time.monotonic() + REPORT_GRACE
            while not self._broken and time.monotonic() < deadline:
                time.sleep(0.02)
        time.sleep(0.2 if self._broken else 0.0)  # for ranks that know more than the first
        deadline = time.monotonic() + REPORT_GRACE
        while self._being_examined and time.monotonic() < deadline:
            time.sleep(0.02)
        self._is_closing.set()
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

    def _describe(self, broken: Broken) -> str:
        return describe(broken, self._names[broken.rank])


def _require_same_processors(infos: list[WorkerInfo]) -> None:
    """Raise PluginError if ranks have different logits processors, and would sample differently."""
    found = [info.logits_processors for info in infos]
    if any(one != found[0] for one in found):
        listed = "; ".join(
            f"rank {rank}: {', '.join(map(str, one)) or 'none'}" for rank, one in enumerate(found)
        )
        raise PluginError(
            f"The ranks have different logits processors ({listed}). Install the same packages on "
            "all machines."
        )


class _Operation:
    """An operation that ranks do. Its result is there when all have answered."""

    def __init__(self, num_ranks: int) -> None:
        self.result: Future[None] = Future()
        self._lock, self._num_open = threading.Lock(), num_ranks
        self._error: BaseException | None = None

    def count(self, error: BaseException | None) -> None:
        """Count a rank's answer. From any thread."""
        with self._lock:
            self._num_open -= 1
            self._error = self._error or error
            if self._num_open:
                return
        if self._error is None:
            self.result.set_result(None)
        else:
            self.result.set_exception(self._error)


def _error_of(done: OperationDone) -> Exception | None:
    if done.error is None:
        return None
    return error_of_kind(done.kind, done.error) or RuntimeError(f"rank {done.rank}: {done.error}")


class _Guarded:
    """A step in flight on all ranks."""

    def __init__(self, executor: MultiprocExecutor, step: int, pending: Pending | None) -> None:
        self._executor, self._step, self._pending = executor, step, pending

    def result(self) -> ModelOutput:
        return self._executor.result(self._step, self._pending)

    def constrain(self, masks: Masks) -> None:
        self._executor.constrain(self._step, self._pending, masks)
