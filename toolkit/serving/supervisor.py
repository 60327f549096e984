"""Front end with several API workers, on one port and with the same engine cores."""

import asyncio
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field

from toolkit.api.http.connections.listener import Acceptor
from toolkit.api.http.stored_responses import ResponseStore
from toolkit.config import ServerConfig
from toolkit.engine.cores.core_client import describe_exit
from toolkit.engine.messages import Failed
from toolkit.errors import ToolkitError, error_of_kind
from toolkit.logs import LogStyle
from toolkit.metrics import Metrics
from toolkit.metrics.merge import Family, expose, merge, snapshot
from toolkit.metrics.shared import SharedReading
from toolkit.scheduler.stats import EngineStats, total
from toolkit.serving.control import (
    ControlChannel,
    Drain,
    Drained,
    Exposition,
    FoundModel,
    FromWorker,
    GetExposition,
    GetMetrics,
    Prepared,
    Serving,
    Setup,
    ShutDown,
    StartServing,
    ToWorker,
    WorkerMetrics,
)
from toolkit.serving.front import LoadedModel, ModelFacts, ModelSetup
from toolkit.serving.kept_connections import Ended, KeptConnections
from toolkit.serving.model_cores import ModelCores
from toolkit.serving.shared_responses import ResponseQuery, answer
from toolkit.worker import Report
from toolkit.zygote.keeper import KeeperServer

logger = logging.getLogger(__name__)

MAX_RESTARTS = 3  # of workers, within RESTART_WINDOW
RESTART_WINDOW = 60.0  # seconds
END_TIMEOUT = 12.0  # seconds for workers to end; a little more than for their connections
METRICS_TIMEOUT = 1.0  # seconds for a worker to send metrics; then its last ones are used


class WorkerDiedError(ToolkitError):
    """An API worker ended unexpectedly."""


@dataclass(slots=True, eq=False)
class _WorkerProcess:
    """An API worker."""

    client: int
    process: subprocess.Popen[bytes]
    channel: ControlChannel[FromWorker]
    connections: socket.socket  # hands over connections
    kept: KeptConnections | None
    is_prepared: bool = False
    is_started: bool = False  # StartServing was sent; from then on it gets news of the cores
    is_serving: bool = False
    is_drained: bool = False
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)
    """One future per GetMetrics that is not answered, oldest first."""
    families: list[Family] = field(default_factory=list)  # its last WorkerMetrics


class Supervisor:
    """A front end of several processes.

    This process starts the cores and the workers, accepts connections and hands them out in turn,
    collects the metrics, and replaces workers that die. It is client 0 of the cores; each worker is
    another client. Numbers are not reused, so that no message for a dead worker reaches its
    replacement. It also starts the zygote that decodes pictures for all workers.

    Workers import modules and read the tokenizer while the cores load. A prepared worker gets the
    state of all cores at that time. Connections are handed over as file descriptors, over a pair of
    sockets. A worker that cannot read a core's messages exits and is replaced. The requests of a
    worker that has exited are removed from the cores. This process keeps its connections: it sends
    their last wills, and hands idle ones to other workers. With TLS, whose state only the worker
    has, they are cut."""

    def __init__(self, setups: Sequence[ModelSetup], server: ServerConfig) -> None:
        self.failed = asyncio.Event()
        self.failure: ToolkitError | None = None
        self._config = server
        self._created = int(time.time())
        self.metrics = Metrics(server.metrics_prefix, setups[0].names[0])
        self._models = [
            ModelCores(
                index,
                setup,
                self.metrics.for_model(setup.names[0]),
                self._broadcast,
                self._on_cores_changed,
            )
            for index, setup in enumerate(setups)
        ]
        self._found: list[FoundModel] = []
        self._workers: list[_WorkerProcess] = []
        self._num_clients = 1
        self._restarts: deque[float] = deque()
        self._dead_workers: list[Family] = []  # their metrics
        self._responses = ResponseStore(server.response_store)
        self._exposition = SharedReading(self._collect_exposition)
        self._tasks: set[asyncio.Task[None]] = set()
        self._served: asyncio.Future[list[ModelFacts]] = asyncio.get_running_loop().create_future()
        """Done when all workers serve for the first time, or cannot."""
        self._is_ending = False  # workers that end are no longer replaced
        self._shared = tempfile.TemporaryDirectory(prefix="tk-")
        """Folder with the files of adapters that the workers share, and a socket."""
        self._keeper_path = os.path.join(self._shared.name, "zygotes")
        self._keeper: KeeperServer | None = None  # of the processes that decode pictures
        self._acceptor: Acceptor | None = None

    @property
    def stats(self) -> EngineStats:
        """Sums over the cores, as of their last steps."""
        return total([model.stats for model in self._models])

    @property
    def num_active(self) -> int:
        """Sequences in the cores, as of their last steps."""
        return self.stats.num_running + self.stats.num_waiting

    @property
    def idle_seconds(self) -> float:
        """0: only API workers know their last requests, so --idle-timeout is refused."""
        return 0.0

    async def start(self, listener: socket.socket, report: Report) -> list[LoadedModel]:
        """Start the workers and, while they import, the cores of one model after the other.

        Returns when all workers serve."""
        self._keeper = KeeperServer(self._keeper_path)
        for _ in range(self._config.api_workers):
            await self._spawn()
        log = LogStyle.of(self._config.log_level, self._config.log_format)
        for model in self._models:
            self._found.append(await model.launch(log, self._shared.name))
            if model is self._models[-1]:
                for worker in self._workers:
                    self._set_up(worker)
            await model.ready(report)
        self._start_prepared()
        facts = await self._served
        self._acceptor = Acceptor(listener, self._hand_over)
        return [
            LoadedModel(model.setup, model.infos, one)
            for model, one in zip(self._models, facts, strict=True)
        ]

    async def drain(self) -> None:
        """Let all workers refuse new work, and wait until they have answered all accepted work."""
        self._stop_replacing()
        for worker in self._workers:
            worker.channel.send(Drain())
        while not all(worker.is_drained for worker in self._workers):
            await asyncio.sleep(0.02)

    async def shut_down(self, reason: str) -> None:
        """Let all workers end open requests, and then themselves."""
        self._stop_replacing()
        self._stop_accepting()
        for worker in self._workers:
            worker.channel.send(ShutDown(reason))
        deadline = time.monotonic() + END_TIMEOUT
        while self._workers and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        """End all processes."""
        self._is_ending = True
        self._stop_accepting()
        if not self._served.done():
            self._served.cancel()
        for task in list(self._tasks):
            task.cancel()
        for worker in self._workers:
            worker.process.kill()
            worker.process.wait()
        for model in self._models:
            await model.stop()
        if self._keeper is not None:
            await asyncio.to_thread(self._keeper.close)
        self._shared.cleanup()

    # ---- workers

    async def _spawn(self) -> _WorkerProcess:
        """Start a worker. It imports its modules and waits for its Setup."""
        ours, theirs = socket.socketpair()
        connections, taken = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        can_keep = sys.platform == "linux" and self._config.ssl_certfile is None
        kept = KeptConnections(self._config.api_workers) if can_keep else None
        with theirs, taken:
            passed = [taken.fileno()] if kept is None else [taken.fileno(), kept.memory_file]
            process = subprocess.Popen(
                [sys.executable, "-m", "toolkit.serving.api_worker", *map(str, passed)],
                stdin=theirs.fileno(),
                pass_fds=passed,
                start_new_session=True,
            )
        ours.setblocking(False)
        connections.setblocking(False)
        channel = await ControlChannel[FromWorker].over(ours, FromWorker)
        worker = _WorkerProcess(self._num_clients, process, channel, connections, kept)
        self._num_clients += 1
        self._workers.append(worker)
        self._create_task(self._watch(worker))
        return worker

    def _set_up(self, worker: _WorkerProcess) -> None:
        worker.channel.send(
            Setup(self._found, self._config, self._created, worker.client, self._keeper_path)
        )

    def _start_prepared(self) -> None:
        """Send StartServing to workers that are prepared, if each model has a core."""
        if self._is_ending or not all(model.has_core for model in self._models):
            return
        addresses = [model.addresses for model in self._models]
        for worker in self._workers:
            if worker.is_prepared and not worker.is_started:
                worker.is_started = True
                worker.channel.send(StartServing(addresses))

    def _stop_replacing(self) -> None:
        """Replace no worker from now on. Kill those that have not started: they have no work."""
        self._is_ending = True
        for worker in self._workers:
            if not worker.is_started:
                worker.process.kill()

    async def _watch(self, worker: _WorkerProcess) -> None:
        """Handle a worker's messages, and its end."""
        while (message := await worker.channel.receive()) is not None:
            if isinstance(message, Prepared):
                worker.is_prepared = True
                self._start_prepared()
            elif isinstance(message, Serving):
                worker.is_serving = True
                if not self._served.done() and all(w.is_serving for w in self._workers):
                    self._served.set_result(message.models)
            elif isinstance(message, Failed):
                self._fail(
                    error_of_kind(message.kind, message.message) or WorkerDiedError(message.message)
                )
            elif isinstance(message, WorkerMetrics):
                worker.families = message.families
                _complete(worker.waiting.popleft())
            elif isinstance(message, GetExposition):
                self._create_task(self._send_exposition(worker))
            elif isinstance(message, ResponseQuery):
                worker.channel.send(await answer(self._responses, message, worker.client))
            else:
                assert isinstance(message, Drained)
                worker.is_drained = True
        self._responses.fail(worker.client)
        code = await self._exit_code(worker)
        worker.connections.close()
        await worker.channel.close()
        self._workers.remove(worker)
        for future in worker.waiting:
            _complete(future)
        ended = None if worker.kept is None else worker.kept.end()
        if ended is not None and self._acceptor is not None:
            self._acceptor.offer(ended.idle)
        elif ended is not None:
            for connection in ended.idle:
                connection.close()
        if not self._is_ending:
            await self._replace(worker, describe_exit(code), _describe_end(ended))

    async def _exit_code(self, worker: _WorkerProcess) -> int:
        """Return the exit code of a worker that has closed its channel."""
        deadline = time.monotonic() + END_TIMEOUT
        while (code := worker.process.poll()) is None and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        if code is None:
            worker.process.kill()
            code = worker.process.wait()
        return code

    async def _replace(self, worker: _WorkerProcess, how: str, lost: str) -> None:
        """Replace a dead worker. Fails if too many have died, or if one dies during start-up."""
        died = f"An API worker (process {worker.process.pid}) ended unexpectedly: {how}"
        if not self._served.done():
            self._fail(WorkerDiedError(f"{died}. See its output in the log."))
            return
        # Gauges describe live workers only.
        counters = [family for family in worker.families if family.kind != "gauge"]
        self._dead_workers = merge([self._dead_workers, counters])
        for model in self._models:
            model.remove_client(worker.client)
        now = time.monotonic()
        while self._restarts and self._restarts[0] < now - RESTART_WINDOW:
            self._restarts.popleft()
        if len(self._restarts) >= MAX_RESTARTS:
            self._fail(
                WorkerDiedError(
                    f"{died}. That is the {MAX_RESTARTS + 1}th within {RESTART_WINDOW:g} s, so the "
                    "server ends. See their output in the log."
                )
            )
            return
        self._restarts.append(now)
        logger.error("%s. %s It is being replaced.", died, lost)
        replacement = await self._spawn()
        if self._is_ending:
            replacement.process.kill()
            return
        self._set_up(replacement)

    def _fail(self, error: ToolkitError) -> None:
        """End the server with an error, or its start-up."""
        self._is_ending = True
        if not self._served.done():
            self._served.set_exception(error)
            self._served.exception()  # retrieved: start-up may fail for another reason first
        elif self.failure is None:
            self.failure = error
            self.failed.set()

    # ---- connections

    def _hand_over(self, connection: socket.socket) -> bool:
        """Hand a connection to the next worker. Returns False if none can take it now.

        Only the worker and its `kept` have it then."""
        for index, worker in enumerate(self._workers):
            if not worker.is_serving:
                continue
            try:
                if worker.kept is not None:
                    worker.kept.hand_over(connection, worker.connections)
                else:
                    socket.send_fds(worker.connections, [b"none"], [connection.fileno()])
                    connection.close()
            except OSError:  # its socket is full, or it has died
                continue
            self._workers = [*self._workers[index + 1 :], *self._workers[: index + 1]]
            return True
        return False

    def _stop_accepting(self) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
            self._acceptor = None

    # ---- cores and metrics

    def _on_cores_changed(self) -> None:
        """Fail when a model can run no more; start workers that wait for a core."""
        errors = (model.fatal_error for model in self._models)
        if (error := next(filter(None, errors), None)) is not None:
            self._fail(error)
        else:
            self._start_prepared()

    def _broadcast(self, message: ToWorker) -> None:
        for worker in self._workers:
            if worker.is_started:
                worker.channel.send(message)

    async def _send_exposition(self, receiver: _WorkerProcess) -> None:
        """Send the metrics of all processes to the worker that asked."""
        receiver.channel.send(Exposition(await self._exposition.get()))

    async def _collect_exposition(self) -> bytes:
        waiting = []
        for worker in self._workers:
            if worker.is_serving:
                worker.waiting.append(asyncio.get_running_loop().create_future())
                waiting.append(worker.waiting[-1])
                worker.channel.send(GetMetrics())
        await asyncio.wait(waiting, timeout=METRICS_TIMEOUT)
        collected = [
            snapshot(self.metrics.registry),
            self._dead_workers,
            *(worker.families for worker in self._workers),
        ]
        return expose(merge(collected))

    def _create_task(self, work: Coroutine[None, None, None]) -> None:
        """Run a coroutine in the background until it is done or the server closes."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _describe_end(ended: Ended | None) -> str:
    """Return a sentence about the requests of a worker that has died."""
    if ended is None:
        return "Its requests are lost."
    return (
        f"{ended.num_warned} of its requests got an error, {ended.num_cut} were cut in the middle "
        f"of an answer; {len(ended.idle)} idle connections stay open."
    )


def _complete(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
