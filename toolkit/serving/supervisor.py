"""Several processes that answer requests, on one port and with the same engine cores."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field

from toolkit.config import EngineConfig, ServerConfig
from toolkit.engine.async_llm import find_folders
from toolkit.engine.cores.core_client import CoreClient, all_ready, how_ended
from toolkit.engine.cores.launch import plan
from toolkit.engine.cores.replica import without_it
from toolkit.engine.cores.revival import Reviver
from toolkit.engine.messages import EngineOutputs, Failed, Leave
from toolkit.engine.observation import observe_gauges, observe_step
from toolkit.errors import EngineDeadError, ToolkitError, error_of_kind
from toolkit.logs import LogStyle
from toolkit.metrics import Metrics
from toolkit.metrics.merge import Family, expose, merge, snapshot
from toolkit.scheduler.stats import EngineStats, total
from toolkit.serving.control import (
    Begin,
    Channel,
    CoreState,
    Count,
    Counted,
    Dead,
    Drain,
    Drained,
    End,
    Expose,
    Exposition,
    FromWorker,
    Loads,
    Paused,
    Prepared,
    Revived,
    Serving,
    Setup,
    ToWorker,
)
from toolkit.serving.front import Served
from toolkit.worker import Report, WorkerInfo

logger = logging.getLogger(__name__)

MAX_RESTARTS = 3
RESTART_WINDOW = 60.0
"""Seconds in which as many workers as that may be replaced."""
END_TIMEOUT = 12.0
"""Seconds that the workers get to end: a little more than their connections."""
COUNT_TIMEOUT = 1.0
"""Seconds that a worker gets to tell what it has counted; what it last told stands for it then."""
BACKLOG = 2048
CONNECTIONS_PER_TURN = 32
LOADS_INTERVAL = 0.02
"""Seconds, at least, between two words to the workers of what the cores have to do."""
RETRY_INTERVAL = 0.01
"""Seconds before another attempt to hand a connection over, when no worker takes any."""


class WorkerDiedError(ToolkitError):
    """A process that answers requests ended when nobody had asked it to."""


@dataclass(slots=True, eq=False)
class _Worker:
    """A process that answers requests, as the first process sees it."""

    client: int
    process: subprocess.Popen[bytes]
    channel: Channel[FromWorker]
    connections: socket.socket
    """Where it takes connections over."""
    prepared: bool = False
    begun: bool = False
    """Whether it has been told of a core: from then on it hears of the end of one, too."""
    serving: bool = False
    drained: bool = False
    asked: deque[asyncio.Future[None]] = field(default_factory=deque)
    """Who waits for it to count, in the order in which it was asked."""
    families: list[Family] = field(default_factory=list)
    """What it last told of its counts."""


@dataclass(slots=True, eq=False)
class _Core:
    """A place for an engine core: one that dies is followed by another."""

    index: int
    client: CoreClient
    reviver: Reviver
    metrics: Metrics
    info: WorkerInfo | None
    """None while none runs."""
    dead: str = ""
    """Why there will be no other."""
    stats: EngineStats = field(default_factory=EngineStats)

    @property
    def state(self) -> CoreState:
        """What workers need to know."""
        return CoreState(self.client.sockets if self.info is not None else "", self.info, self.dead)


class Supervisor:
    """A Front of several processes. This one starts the cores and the workers, accepts connections and hands them
    out in turn, gathers the metrics, and replaces workers that die. It is the cores' client 0, and each worker
    another; a number is never used again, so that nothing meant for a dead worker reaches the next.
    """

    def __init__(self, engine: EngineConfig, server: ServerConfig, name: str) -> None:
        """`name`: the model's, in the API."""
        self.failed = asyncio.Event()
        self.failure: ToolkitError | None = None
        self._engine, self._config, self._name = engine, server, name
        self._created = int(time.time())
        self.metrics = Metrics(server.metrics_prefix, name)
        self._workers: list[_Worker] = []
        self._num_clients = 1
        self._restarts: deque[float] = deque()
        self._departed: list[Family] = []
        """What workers that have died had counted."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._begun: asyncio.Future[Served] = asyncio.get_running_loop().create_future()
        """Done when all workers serve for the first time, or cannot."""
        self._ending = False
        """From here on no worker that ends is replaced."""
        self._clients: list[CoreClient] = []
        """Of the cores that were started first."""
        self._cores: list[_Core] = []
        """Empty until all of them are ready."""
        self._telling_loads = False
        self._listener: socket.socket | None = None
        self._held: socket.socket | None = None
        """A connection that no worker could take yet."""
        self._retry: asyncio.TimerHandle | None = None

    @property
    def stats(self) -> EngineStats:
        """What the cores' last steps told, together."""
        return total([core.stats for core in self._cores])

    @property
    def num_active(self) -> int:
        """Sequences that the cores have, as of their last steps."""
        return self.stats.num_running + self.stats.num_waiting

    async def start(self, listener: socket.socket, report: Report) -> Served:
        """Starts the workers and, while they import, the cores; returns when all of them serve."""
        for _ in range(self._config.api_workers):
            await self._spawn()
        self._folders = await find_folders(self._engine.model)
        log = LogStyle.of(self._config.log_level, self._config.log_format)
        launches = plan(self._engine, self._folders[0], log)
        self._clients = [CoreClient(launch) for launch in launches]
        for worker in self._workers:
            self._set_up(worker)
        self._infos = await all_ready(self._clients, report)
        for launch, client, info in zip(launches, self._clients, self._infos, strict=True):
            metrics = self.metrics.for_engine(launch.index)
            self._cores.append(
                _Core(launch.index, client, Reviver(launch.like(info), client), metrics, info)
            )
        for core in self._cores:
            self._run(self._read_core(core))
        self._begin()
        served = await self._begun
        self._listener = listener
        listener.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # inherited: see HTTPServer.start
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._accept()
        return served

    async def drained(self) -> None:
        """Has all workers refuse new work, and waits until they have answered what they had accepted."""
        self._end_idle()
        for worker in self._workers:
            worker.channel.send(Drain())
        while not all(worker.drained for worker in self._workers):
            await asyncio.sleep(0.02)

    async def end(self, reason: str) -> None:
        """Has all workers end what still runs, and then themselves."""
        self._end_idle()
        self._stop_accepting()
        for worker in self._workers:
            worker.channel.send(End(reason))
        deadline = time.monotonic() + END_TIMEOUT
        while self._workers and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        """Ends all processes."""
        self._ending = True
        self._stop_accepting()
        if not self._begun.done():
            self._begun.cancel()
        for task in list(self._tasks):
            task.cancel()
        for worker in self._workers:
            worker.process.kill()
            worker.process.wait()
        if not self._cores:
            for client in self._clients:
                client.kill()
        await asyncio.gather(*(core.client.stop() for core in self._cores))

    # ---- the workers

    async def _spawn(self) -> _Worker:
        """Starts a worker's process; it imports what it needs, and waits for its Setup."""
        ours, theirs = socket.socketpair()
        connections, taken = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, taken:
            process = subprocess.Popen(
                [sys.executable, "-m", "toolkit.serving.api_worker", str(taken.fileno())],
                stdin=theirs.fileno(),
                pass_fds=(taken.fileno(),),
                start_new_session=True,
            )
        ours.setblocking(False)
        connections.setblocking(False)
        channel = await Channel[FromWorker].over(ours, FromWorker)
        worker = _Worker(self._num_clients, process, channel, connections)
        self._num_clients += 1
        self._workers.append(worker)
        self._run(self._watch(worker))
        return worker

    def _set_up(self, worker: _Worker) -> None:
        model, tokenizer = self._folders
        worker.channel.send(
            Setup(
                engine=self._engine,
                server=self._config,
                name=self._name,
                created=self._created,
                folder=str(model),
                tokenizer_folder=str(tokenizer),
                client=worker.client,
            )
        )

    def _begin(self) -> None:
        """Has the workers begin that are prepared, if a core runs."""
        states = [core.state for core in self._cores]
        if self._ending or all(state.info is None for state in states):
            return
        for worker in self._workers:
            if worker.prepared and not worker.begun:
                worker.begun = True
                worker.channel.send(Begin(states))

    def _end_idle(self) -> None:
        """From here on no worker takes another's place; those that have not begun have nothing to end."""
        self._ending = True
        for worker in self._workers:
            if not worker.begun:
                worker.process.kill()

    async def _watch(self, worker: _Worker) -> None:
        """Takes in what a worker says, and deals with its end."""
        while (message := await worker.channel.receive()) is not None:
            if isinstance(message, Prepared):
                worker.prepared = True
                self._begin()
            elif isinstance(message, Serving):
                worker.serving = True
                if not self._begun.done() and all(w.serving for w in self._workers):
                    self._begun.set_result(
                        Served(self._infos, message.has_tokenizer, message.has_chat_template)
                    )
            elif isinstance(message, Failed):
                self._fail(
                    error_of_kind(message.kind, message.message)
                    or WorkerDiedError(message.message)
                )
            elif isinstance(message, Counted):
                worker.families = message.families
                _wake(worker.asked.popleft())
            elif isinstance(message, Expose):
                self._run(self._expose(worker))
            else:
                assert isinstance(message, Drained)
                worker.drained = True
        code = await self._end_of(worker)
        worker.connections.close()
        await worker.channel.close()
        self._workers.remove(worker)
        for asker in worker.asked:
            _wake(asker)
        if not self._ending:
            await self._replace(worker, how_ended(code))

    async def _end_of(self, worker: _Worker) -> int:
        """The exit code of a worker that has closed its channel."""
        deadline = time.monotonic() + END_TIMEOUT
        while (code := worker.process.poll()) is None and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        if code is None:
            worker.process.kill()
            code = worker.process.wait()
        return code

    async def _replace(self, worker: _Worker, how: str) -> None:
        """Another worker takes the place of one that died; too many, and the server gives up."""
        died = f"An API worker (process {worker.process.pid}) ended unasked: {how}"
        if not self._begun.done():
            self._fail(WorkerDiedError(f"{died}. The log has its last words."))
            return
        counted = [
            family for family in worker.families if family.kind != "gauge"
        ]  # those are of the living
        self._departed = merge([self._departed, counted])
        for core in self._cores:
            if not core.dead:
                core.client.send(Leave(worker.client))
        now = time.monotonic()
        while self._restarts and self._restarts[0] < now - RESTART_WINDOW:
            self._restarts.popleft()
        if len(self._restarts) >= MAX_RESTARTS:
            self._fail(
                WorkerDiedError(
                    f"{died}, the {MAX_RESTARTS + 1}th within {RESTART_WINDOW:g} s: the server ends. The log has "
                    "their last words."
                )
            )
            return
        self._restarts.append(now)
        logger.error("%s. Its requests are lost; another takes its place.", died)
        another = await self._spawn()
        if self._ending:
            another.process.kill()
            return
        self._set_up(another)

    def _fail(self, error: ToolkitError) -> None:
        """The server cannot go on, or not begin."""
        self._ending = True
        if not self._begun.done():
            self._begun.set_exception(error)
            self._begun.exception()  # heard of, should start-up fail for another reason first
        elif self.failure is None:
            self.failure = error
            self.failed.set()

    # ---- connections

    def _accept(self) -> None:
        """Hands out the connections that have come, to one worker after the other."""
        assert self._listener is not None
        loop = asyncio.get_running_loop()
        loop.add_reader(self._listener, self._accept)
        try:
            for _ in range(CONNECTIONS_PER_TURN):
                if self._held is None:
                    self._held, _ = self._listener.accept()
                if not self._hand_over(self._held):
                    break
                self._held.close()
                self._held = None
            else:
                return
        except BlockingIOError:
            return
        except OSError as error:  # out of file descriptors, mostly
            logger.error("connections cannot be accepted: %s", error.strerror)
        loop.remove_reader(self._listener)
        self._retry = loop.call_later(RETRY_INTERVAL, self._accept)

    def _hand_over(self, connection: socket.socket) -> bool:
        """Gives a connection to the worker whose turn it is; False when none can take one now."""
        for index, worker in enumerate(self._workers):
            if not worker.serving:
                continue
            try:
                socket.send_fds(worker.connections, [b"c"], [connection.fileno()])
            except OSError:  # it has not taken many others yet, or has died
                continue
            self._workers = [*self._workers[index + 1 :], *self._workers[: index + 1]]
            return True
        return False

    def _stop_accepting(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            if self._retry is not None:
                self._retry.cancel()
        if self._held is not None:
            self._held.close()
            self._held = None

    # ---- the cores and the metrics

    async def _read_core(self, core: _Core) -> None:
        """Takes in the steps' figures; when the core has died, starts another, with which the workers go on."""
        while True:
            try:
                while True:
                    for message in await core.client.receive():
                        if isinstance(message, EngineOutputs) and message.stats is not None:
                            core.stats = message.stats
                            observe_step(core.metrics, message.stats)
                    self._tell_loads()
            except Exception as cause:
                gone = [
                    one
                    for one in self._cores
                    if one.info is not None and (one is core or one.client.ended)
                ]
                for one in gone:
                    one.info, one.stats = None, EngineStats()
                    observe_gauges(one.metrics, one.stats)
                if gone:  # else another of those that died together has told
                    self._tell(Paused([one.index for one in gone]))
                try:
                    client, core.info = await core.reviver.another(cause)
                except EngineDeadError as error:
                    core.dead = error.message
                    core.client.kill()
                    self._tell(Dead(core.index, error.message))
                    if all(one.dead for one in self._cores):
                        self._fail(error)
                    else:
                        logger.error("%s", without_it(error))
                    return
                core.client.kill()
                core.client = client
                core.metrics.count_restart()
                self._tell(Revived(core.index, client.sockets, core.info))
                self._begin()

    def _tell_loads(self) -> None:
        """Has the workers know how much each of several cores has to do: each knows its own requests alone."""
        if len(self._cores) == 1 or self._telling_loads:
            return
        self._telling_loads = True

        def tell() -> None:
            self._telling_loads = False
            self._tell(
                Loads([core.stats.num_running + core.stats.num_waiting for core in self._cores])
            )

        asyncio.get_running_loop().call_later(LOADS_INTERVAL, tell)

    def _tell(self, message: ToWorker) -> None:
        for worker in self._workers:
            if worker.begun:
                worker.channel.send(message)

    async def _expose(self, asker: _Worker) -> None:
        """Answers a worker that wants the whole server's metrics."""
        counting = []
        for worker in self._workers:
            if worker.serving:
                worker.asked.append(asyncio.get_running_loop().create_future())
                counting.append(worker.asked[-1])
                worker.channel.send(Count())
        await asyncio.wait(counting, timeout=COUNT_TIMEOUT)
        taken = [
            snapshot(self.metrics.registry),
            self._departed,
            *(w.families for w in self._workers),
        ]
        asker.channel.send(Exposition(expose(merge(taken))))

    def _run(self, work: Coroutine[None, None, None]) -> None:
        """Runs something beside everything else, until it is done or the server closes."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _wake(asker: asyncio.Future[None]) -> None:
    if not asker.done():
        asker.set_result(None)
