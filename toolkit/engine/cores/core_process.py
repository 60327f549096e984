"""The engine core in a process of its own: `python -m toolkit.engine.cores.core_process SOCKETS`, started by
`CoreClient`.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import sys
from pathlib import Path

import msgspec
import zmq

from toolkit.engine.cores.sockets import Socket, address, has_message, open_socket
from toolkit.engine.messages import (
    Abort,
    Alive,
    EndRequests,
    EngineOutput,
    EngineOutputs,
    EngineRequest,
    Failed,
    Forgotten,
    FromCore,
    Knock,
    Leave,
    ListRequests,
    Phase,
    Ping,
    Pong,
    Ready,
    RequestInfo,
    RequestList,
    ResetPrefixCache,
    Start,
    Stop,
    ToCore,
)
from toolkit.errors import ToolkitError, WorkersLostError
from toolkit.hardware.parent import end_with_parent
from toolkit.models.hub import locate_tokenizer
from toolkit.sampling.params import PoolingParams, SamplingParams
from toolkit.sequence import SequenceSpec
from toolkit.text.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

CANARY = -1
"""The client whose requests only show that a step runs; nobody is told of them."""


class CoreProcess:
    """Reads requests, steps the core, sends what each step gave. Sleeps on the socket when there is nothing
    to do.

    Every client has an outbox of its own; the first one is told of start-up and of the engine's end.
    """

    def __init__(self, sockets: str) -> None:
        self._sockets = sockets
        self._context = zmq.Context()
        self._inbox = open_socket(self._context, zmq.PULL)
        self._inbox.bind(address(sockets, "in"))
        self._outboxes: dict[int, Socket] = {}
        self._gone: set[int] = {CANARY}
        """Clients that have left: their last messages may come after the news of it."""
        self._pinged: set[int] = set()
        """Clients that want to know when a step has run."""
        self._decoder = msgspec.msgpack.Decoder(ToCore)
        self._encoder = msgspec.msgpack.Encoder()

    def run(self) -> None:
        """Until a Stop comes. Whatever ends it is told to the front end first."""
        try:
            self._serve()
        except ToolkitError as error:
            self._send(Failed(type(error).__name__, error.message))
        except WorkersLostError as error:
            self._send(Failed("", str(error)))
        except Exception as error:
            logger.exception("the engine ended")
            self._send(Failed("", _root_cause(error)))
        finally:
            for outbox in self._outboxes.values():
                outbox.close(linger=2000)

    def _serve(self) -> None:
        start = msgspec.msgpack.decode(self._inbox.recv(), type=Start)
        start.log.apply()

        from toolkit.engine.core import EngineCore
        from toolkit.executor import start_executor

        executor = start_executor(
            start.config,
            Path(start.folder),
            lambda name, seconds: self._send(Phase(name, seconds)),
            start.log,
            self._end_now,
            Path(self._sockets),
        )
        self._core = EngineCore(
            start.config, executor, lambda: load_tokenizer(tokenizer_folder(start))
        )
        gc.collect()
        gc.freeze()  # what lives as long as the process is not searched again
        self._send(Ready(executor.info))
        news: dict[int, EngineOutputs] = {}
        while self._take_messages():
            if not self._core.overlaps:
                self._send_all(news)
            self._core.launch()
            if self._core.overlaps:  # the device is busy before anybody is told what it has done
                self._send_all(news)
            news = self._core.collect()
            if self._pinged:
                self._answer(news)
            if not self._core.has_work:
                self._send_all(news)
                news = {}
            elif not self._core.is_running:
                self._inbox.poll(1)
        self._core.shutdown()

    def _take_messages(self) -> bool:
        """Handles what has come, waiting for something when there is no work; False when told to stop."""
        if not self._core.has_work:
            self._inbox.poll()
        while has_message(self._inbox):
            message = self._decoder.decode(self._inbox.recv())
            if isinstance(message, EngineRequest):
                self._add(message)
            elif isinstance(message, Abort):
                self._core.abort(message)
                self._send(EngineOutputs(stats=self._core.stats()))
            elif isinstance(message, Leave):
                self._forget(message.client)
            elif isinstance(message, ResetPrefixCache):
                self._core.reset_prefix_cache()
                for client in list(self._outboxes):
                    self._send(Forgotten(), client)
            elif isinstance(message, ListRequests):
                self._tell_of(self._core.live_requests(), message)
            elif isinstance(message, EndRequests):
                ended, told = self._core.end_requests(message.id)
                self._send_all(told)
                self._tell_of(ended, message)
            elif isinstance(message, Ping):
                self._ping(message.client)
            elif isinstance(message, Knock):
                self._send(Alive())
            else:
                assert isinstance(message, Stop)
                return False
        return True

    def _tell_of(self, requests: list[RequestInfo], asked: ListRequests | EndRequests) -> None:
        self._send(
            RequestList(asked.ticket, requests, self._core.scheduler.pool.usage), asked.client
        )

    def _add(self, request: EngineRequest) -> None:
        if request.client in self._gone:
            return
        try:
            self._core.add(request)
        except ValueError as error:
            failed = [
                EngineOutput(request.number + i, [], finish_reason="error", error=str(error))
                for i in range(request.num_sequences)
            ]
            self._send(EngineOutputs(failed), request.client)

    def _ping(self, client: int) -> None:
        """The next step's end is the answer; when there is no work, a step of one token is made."""
        if not self._core.has_work:
            generates = self._core.executor.info.generates
            self._core.add(
                EngineRequest(
                    id="canary",
                    client=CANARY,
                    spec=SequenceSpec(
                        prompt_token_ids=[0],
                        params=SamplingParams(max_tokens=1, temperature=0.0, seed=0),
                        max_tokens=1,
                        eos_token_ids=[],
                        pooling=None if generates else PoolingParams(),
                    ),
                )
            )
        self._pinged.add(client)

    def _answer(self, news: dict[int, EngineOutputs]) -> None:
        """Sends a step's news, that it has run, and whether it failed."""
        news.pop(CANARY, None)
        self._send_all(news)
        news.clear()
        for client in self._pinged:
            self._send(Pong(self._core.failure), client)
        self._pinged.clear()
        self._core.leave(CANARY)

    def _end_now(self, kind: str, message: str) -> None:
        """Tells the first front end what ended the engine, and ends it. From another thread than the one that is stuck."""
        context = zmq.Context()
        outbox = open_socket(context, zmq.PUSH)
        outbox.connect(address(self._sockets, "out0"))
        outbox.send(msgspec.msgpack.encode(Failed(kind, message)))
        context.destroy(linger=2000)  # returns when it is sent
        os._exit(1)

    def _forget(self, client: int) -> None:
        """Ends what a client that is gone has asked for."""
        self._gone.add(client)
        self._core.leave(client)
        outbox = self._outboxes.pop(client, None)
        if outbox is not None:
            outbox.close(linger=0)
        self._send(EngineOutputs(stats=self._core.stats()))

    def _send_all(self, messages: dict[int, EngineOutputs]) -> None:
        for client, message in messages.items():
            self._send(message, client)

    def _send(self, message: FromCore, client: int = 0) -> None:
        if client in self._gone:
            return
        outbox = self._outboxes.get(client)
        if outbox is None:
            outbox = self._outboxes[client] = open_socket(self._context, zmq.PUSH)
            outbox.connect(address(self._sockets, f"out{client}"))
        outbox.send(self._encoder.encode(message))


def tokenizer_folder(start: Start) -> Path:
    tokenizer = start.config.model.tokenizer
    return Path(start.folder) if tokenizer is None else locate_tokenizer(tokenizer)


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def main() -> None:
    # The front end drains on these and then sends Stop; the core must go on until then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sockets = sys.argv[1]
    end_with_parent(lambda: shutil.rmtree(sockets, ignore_errors=True))
    CoreProcess(sockets).run()


if __name__ == "__main__":
    main()
