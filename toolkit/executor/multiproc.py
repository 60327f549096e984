"""One worker for each rank: the first in the engine's own process, the others in processes of their own on this machine."""

from __future__ import annotations

import logging
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import toolkit.errors
from toolkit.config import EngineConfig
from toolkit.errors import ToolkitError, WorkersLostError
from toolkit.executor.base import Executor, Pending
from toolkit.executor.channel import Channel
from toolkit.executor.messages import (
    Answer,
    Begin,
    Broken,
    Call,
    Constrain,
    End,
    Here,
    Running,
    Step,
    decode_from_rank,
    encode,
)
from toolkit.executor.progress import Progress
from toolkit.executor.sizes import require_size
from toolkit.logs import LogStyle
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
    """Every rank gets the same messages in the same order, and samples the same tokens; the first one's are the result.

    When a rank ends, or a step takes longer than `--worker-timeout`, no rank can go on: the step raises WorkersLostError. Where the
    process may be stuck in a collective that never ends, `on_failure` is called from another thread.
    """

    def __init__(
        self,
        config: EngineConfig,
        folder: Path,
        report: Report,
        log: LogStyle,
        on_failure: OnFailure | None = None,
        parent: Path | None = None,
    ) -> None:
        """`parent`: a folder in which the ranks' own is made. Default: the system's for temporary files."""
        size = config.parallel.tensor_parallel_size
        require_size(config, folder)
        self._timeout, self._on_failure = config.parallel.worker_timeout, on_failure
        self._meeting = Path(tempfile.mkdtemp(prefix="tk-ranks-", dir=parent))
        weakref.finalize(self, shutil.rmtree, self._meeting, ignore_errors=True)
        self._lock = threading.Lock()
        self._broken: list[Broken] = []
        self._over = threading.Event()
        """Nothing more is expected of the ranks: the end was asked for, or has been told."""
        self._answers: queue.Queue[Answer | Here | Running] = queue.Queue()
        self._busy_since: float | None = None
        """When this thread began to wait for a step."""
        self._steps = 0
        self._ranks = [_Rank(rank, config, folder, self._meeting, log) for rank in range(1, size)]
        self._worker: Worker | None = None
        for rank in self._ranks:
            threading.Thread(target=self._listen, args=(rank,), daemon=True, name=f"rank-{rank.rank}").start()
        try:
            self._await(Here)
            worker = self._worker = Worker(config, folder, 0, self._meeting)
            self.info = worker.start(report)
            self._progress = Progress(self._meeting, size)
            self._await(Running)
        except Exception as error:
            lost = self._lost(error)
            self.shutdown()
            raise lost from None
        threading.Thread(target=self._watch, daemon=True, name="rank-watch").start()

    def execute(self, step: SchedulerOutput) -> Pending:
        self.check_health()
        worker = self._worker
        assert worker is not None
        self._steps += 1
        pending = self._guarded(lambda: worker.execute(step), encode(Step(step)))
        return _Guarded(self, step.step, pending)

    def collective(self, method: str, *args: Any) -> list[Any]:
        self.check_health()
        call = encode(Call(method, list(args)))
        own = self._guarded(lambda: getattr(self._worker, method)(*args), call)
        return [own, *(answer.value for answer in self._await(Answer))]

    def check_health(self) -> None:
        if self._worker is None:
            raise RuntimeError("the executor was shut down")
        if self._broken:
            raise WorkersLostError(_words(self._blamed()))

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
        if self._worker is not None:
            self._worker.close()
        self._worker = None
        shutil.rmtree(self._meeting, ignore_errors=True)

    def constrain(self, step: int, pending: Pending, masks: Masks) -> None:
        """Lets a step sample, on every rank."""
        self._guarded(lambda: pending.constrain(masks), encode(Constrain(step, masks)))

    def result(self, pending: Pending) -> ModelOutput:
        return self._guarded(pending.result)

    def _guarded(self, call: Callable[[], T], told: bytes | None = None) -> T:
        """What it gives, after the ranks are told. What it raises becomes the loss of the ranks, since the others may be at another
        point by now.
        """
        self._busy_since = time.monotonic()
        try:
            if told is not None:
                self._send(told)
            return call()
        except Exception as error:
            raise self._lost(error) from error
        except BaseException:  # Ctrl-C: the others go on with the step
            self._broken.append(Broken(0, "", "was interrupted in the middle of a step"))
            raise
        finally:
            self._busy_since = None

    def _send(self, message: bytes) -> None:
        for rank in self._ranks:
            rank.channel.send_bytes(message)

    def _await(self, kind: type[Answer | Here | Running]) -> list[Any]:
        """A message of this kind from each rank, in rank order. Raises WorkersLostError when one ends first."""
        found: list[Any] = []
        while len(found) < len(self._ranks):
            try:
                message = self._answers.get(timeout=LOOK)
            except queue.Empty:
                if self._broken:
                    raise WorkersLostError("a rank has ended") from None
                continue
            assert isinstance(message, kind)
            found.append(message)
        return sorted(found, key=lambda message: message.rank)

    def _listen(self, rank: _Rank) -> None:
        """Hears a rank to its end. A thread of its own."""
        while True:
            try:
                message = decode_from_rank(rank.channel.receive())
            except (EOFError, OSError):
                message = Broken(rank.rank, "", f"ended without a word ({rank.how_ended()})")
            if not isinstance(message, Broken):
                self._answers.put(message)
                continue
            self._broke(message)
            return

    def _watch(self) -> None:
        """Looks for steps that never end. A thread of its own."""
        while not self._over.wait(LOOK):
            since = self._busy_since
            if since is None or time.monotonic() - since < self._timeout:
                continue
            # Rank 0 waits for the others in the step, so that it is behind as well.
            behind = [rank for rank in self._progress.behind(self._steps) if rank] or [0]
            others = f", nor have ranks {behind[1:]}" if behind[1:] else ""
            what = f"has not finished step {self._steps} in {self._timeout:g} s{others}"
            self._broke(Broken(behind[0], "", what))
            return

    def _broke(self, broken: Broken) -> None:
        with self._lock:
            self._broken.append(broken)
            first = len(self._broken) == 1
        if self._over.is_set() or not first:
            return
        if not self._over.wait(GRACE):  # else this process has noticed by itself
            told = self._blamed()
            for rank in self._ranks:
                rank.kill()  # between CPUs this wakes a rank that waits for them
            if self._on_failure is not None:
                self._on_failure(told.kind, _words(told))

    def _lost(self, error: Exception) -> Exception:
        """What to raise for an error here: what the ranks say of it, if it is that one of them is gone."""
        if isinstance(error, ToolkitError):
            return error
        if self._ranks and not self._broken:
            deadline = time.monotonic() + GRACE
            while not self._broken and time.monotonic() < deadline:
                time.sleep(0.02)
        time.sleep(0.2 if self._broken else 0.0)  # for those that know more than the first
        self._over.set()
        if not self._broken:
            logger.error("rank 0 ended", exc_info=error)
            return WorkersLostError(f"rank 0: {type(error).__name__}: {error}")
        told = self._blamed()
        if told.traceback:
            logger.error("rank %d ended:\n%s", told.rank, told.traceback)
        kind = getattr(toolkit.errors, told.kind, None) if told.kind else None
        if isinstance(kind, type) and issubclass(kind, ToolkitError):
            return kind(told.message)
        return WorkersLostError(_words(told))

    def _blamed(self) -> Broken:
        """The rank that ended first of all, and not for lack of another: one that was killed, or hangs, or knows a reason."""
        with self._lock:
            return min(self._broken, key=_innocence)


class _Guarded:
    """A step under way on all ranks."""

    def __init__(self, executor: MultiprocExecutor, step: int, pending: Pending) -> None:
        self._executor, self._step, self._pending = executor, step, pending

    def result(self) -> ModelOutput:
        return self._executor.result(self._pending)

    def constrain(self, masks: Masks) -> None:
        self._executor.constrain(self._step, self._pending, masks)


class _Rank:
    """Another rank's process, and the way to it."""

    def __init__(self, rank: int, config: EngineConfig, folder: Path, meeting: Path, log: LogStyle) -> None:
        self.rank = rank
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "toolkit.executor.rank", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.channel = Channel(ours)
        self.channel.send(Begin(config, str(folder), str(meeting), rank, log))

    @property
    def pid(self) -> int:
        return self._process.pid

    def how_ended(self) -> str:
        code = self._process.wait()
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()

    def end(self, patience: float) -> None:
        """Waits for its end for so many seconds, then forces it."""
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self.channel.close()


def _innocence(broken: Broken) -> int:
    """0 for the one to blame rather than others."""
    if broken.message.startswith(("ended without a word", "has not finished")):
        return 0
    lost = ("closed by peer", "reset by peer", "Connection refused", "Broken pipe", "timed out", "Timed out")
    return 2 if not broken.kind and any(said in broken.message for said in lost) else 1


def _words(broken: Broken) -> str:
    return (
        f"rank {broken.rank} {broken.message}"
        if _innocence(broken) == 0
        else f"rank {broken.rank}: {broken.message}"
    )
