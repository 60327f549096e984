"""The engine core in a process of its own: `python -m toolkit.engine.process SOCKETS`, started by
`CoreClient`.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback
from pathlib import Path

import msgspec
import zmq

from toolkit.engine.messages import (
    Abort,
    EngineOutput,
    EngineOutputs,
    EngineRequest,
    EngineStats,
    Failed,
    FromCore,
    Phase,
    Ready,
    ResetPrefixCache,
    Start,
    Stop,
    ToCore,
)
from toolkit.errors import ToolkitError

logger = logging.getLogger(__name__)


class CoreProcess:
    """Reads requests, steps the core, sends what each step gave. Sleeps on the socket when there is nothing
    to do.
    """

    def __init__(self, sockets: str) -> None:
        context = zmq.Context()
        self._inbox = context.socket(zmq.PULL)
        self._outbox = context.socket(zmq.PUSH)
        for socket in (self._inbox, self._outbox):
            socket.set_hwm(0)
        self._inbox.connect(f"ipc://{sockets}/in")
        self._outbox.connect(f"ipc://{sockets}/out")
        self._decoder = msgspec.msgpack.Decoder(ToCore)
        self._encoder = msgspec.msgpack.Encoder()

    def run(self) -> None:
        """Until a Stop comes. Whatever ends it is told to the front end first."""
        try:
            self._serve()
        except ToolkitError as error:
            self._send(Failed(type(error).__name__, error.message))
        except Exception as error:
            traceback.print_exc()
            self._send(Failed("", _root_cause(error)))
        finally:
            self._outbox.close(linger=2000)

    def _serve(self) -> None:
        start = msgspec.msgpack.decode(self._inbox.recv(), type=Start)
        logging.basicConfig(level=start.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")

        from toolkit.engine.core import EngineCore
        from toolkit.executor import UniprocExecutor

        executor = UniprocExecutor(
            start.config, Path(start.folder), lambda name, seconds: self._send(Phase(name, seconds))
        )
        self._core = EngineCore(start.config, executor)
        self._send(Ready(executor.info))
        while self._take_messages():
            if self._core.has_work:
                outputs = self._core.step()
                self._send(outputs)
                if not outputs.outputs and not outputs.stats.num_tokens:
                    self._inbox.poll(1)
        self._core.shutdown()

    def _take_messages(self) -> bool:
        """Handles what has come, waiting for something when there is no work; False when told to stop."""
        if not self._core.has_work:
            self._inbox.poll()
        while True:
            try:
                message = self._decoder.decode(self._inbox.recv(zmq.NOBLOCK))
            except zmq.Again:
                return True
            if isinstance(message, EngineRequest):
                self._add(message)
            elif isinstance(message, Abort):
                self._core.abort(message.sequences)
                self._send(EngineOutputs([], self._idle_stats(), []))
            elif isinstance(message, ResetPrefixCache):
                self._core.reset_prefix_cache()
            else:
                assert isinstance(message, Stop)
                return False

    def _add(self, request: EngineRequest) -> None:
        try:
            self._core.add(request)
        except ValueError as error:
            failed = [
                EngineOutput(request.id, i, [], finish_reason="error", error=str(error))
                for i in range(request.params.n)
            ]
            self._send(EngineOutputs(failed, self._idle_stats(), []))

    def _idle_stats(self) -> EngineStats:
        s = self._core.scheduler.take_stats()
        return EngineStats(
            s.num_running,
            s.num_waiting,
            s.kv_cache_usage,
            s.prefix_cache_queries,
            s.prefix_cache_hits,
            s.num_preemptions,
        )

    def _send(self, message: FromCore) -> None:
        self._outbox.send(self._encoder.encode(message))


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def _end_with_parent() -> None:
    """Ends the process when the front end's end of our standard input closes, however it died."""

    def wait() -> None:
        while os.read(0, 1024):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="parent-watch").start()


def main() -> None:
    # The front end drains on these and then sends Stop; the core must go on until then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end_with_parent()
    CoreProcess(sys.argv[1]).run()


if __name__ == "__main__":
    main()
