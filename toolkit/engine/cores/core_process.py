"""Engine core in its own process, started by `CoreClient`.

Usage: `python -m toolkit.engine.cores.core_process SOCKETS`."""

import gc
import logging
import os
import shutil
import signal
import sys
from pathlib import Path

import msgspec
import numpy as np
import zmq

from toolkit.engine.cores.sockets import Socket, address, has_message, open_socket
from toolkit.engine.front.clips import feature_of
from toolkit.engine.messages import (
    Abort,
    ClientGone,
    EndRequests,
    EngineOutput,
    EngineOutputs,
    EngineRequest,
    Failed,
    FromCore,
    GiveFeature,
    ListRequests,
    Operate,
    Ping,
    Pong,
    PrefixCacheCleared,
    Ready,
    RequestInfo,
    RequestList,
    ResetPrefixCache,
    StartCore,
    StartupPhase,
    StepProbe,
    StepReport,
    Stop,
    ToCore,
)
from toolkit.errors import CheckpointError, ToolkitError, WorkersLostError
from toolkit.hardware.parent import exit_with_parent
from toolkit.hub import locate_tokenizer
from toolkit.imports import without_collection
from toolkit.logs import LogStyle, flush_stderr
from toolkit.sampling.params import PoolingParams, SamplingParams
from toolkit.sequence import Feature, SequenceSpec
from toolkit.speech.clip import Clip
from toolkit.text.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

CANARY = -1  # client of the requests that only prove that a step runs. Its output is discarded


class CoreProcess:
    """Reads requests, steps the core, and sends the results. Sleeps on the socket without work.

    Each client has its own outbox. Client 0 also gets start-up phases and the final error."""

    def __init__(self, sockets: str) -> None:
        self._sockets = sockets
        self._context = zmq.Context()
        self._inbox = open_socket(self._context, zmq.PULL)
        self._inbox.bind(address(sockets, "in"))
        self._outboxes: dict[int, Socket] = {}
        self._gone_clients: set[int] = {CANARY}
        """Clients that have exited. Messages from them may still arrive."""
        self._probing_clients: set[int] = set()  # clients that wait for a StepReport
        self._decoder = msgspec.msgpack.Decoder(ToCore)
        self._encoder = msgspec.msgpack.Encoder()

    def run(self) -> None:
        """Run until a Stop arrives. An error is sent to client 0 first."""
        try:
            self._serve()
        except ToolkitError as error:
            self._send(Failed(type(error).__name__, error.message))
        except WorkersLostError as error:
            self._send(Failed("", str(error)))
        except Exception as error:
            logger.exception("the engine failed")
            self._send(Failed("", _root_cause(error)))
        finally:
            for outbox in self._outboxes.values():
                outbox.close(linger=2000)

    def _serve(self) -> None:
        log = msgspec.msgpack.decode(self._inbox.recv(), type=LogStyle)
        log.apply()

        with without_collection():
            from toolkit.engine.core import EngineCore
            from toolkit.executor import start_executor

        start = msgspec.msgpack.decode(self._inbox.recv(), type=StartCore)
        executor = start_executor(
            start.config,
            Path(start.folder),
            lambda name, seconds: self._send(StartupPhase(name, seconds)),
            log,
            self._exit_with_error,
            Path(self._sockets),
        )
        self._core = EngineCore(
            start.config, executor, lambda: load_tokenizer(tokenizer_folder(start))
        )
        self._require_a_step(start.folder)
        gc.collect()
        gc.freeze()  # exempts permanent objects from garbage collection
        self._send(Ready(executor.info))
        outputs: dict[int, EngineOutputs] = {}
        while self._handle_messages():
            if not self._core.overlaps or self._core.spare_seconds:
                self._send_all(outputs)
                outputs = {}
            if not self._wait_for_requests():
                break
            self._core.launch()
            self._send_all(outputs)  # while the device is busy
            outputs = self._core.collect()
            for client, message in self._core.pop_messages():
                self._send(message, client)
            if self._probing_clients:
                self._report_steps(outputs)
            if not self._core.has_work:
                self._send_all(outputs)
                outputs = {}
            elif not self._core.is_running:
                self._inbox.poll(1)
        self._core.shutdown()

    def _handle_messages(self) -> bool:
        """Handle pending messages; without work, wait for one. Returns False after a Stop."""
        if not self._core.has_work:
            self._inbox.poll()
        while has_message(self._inbox):
            message = self._decoder.decode(self._inbox.recv())
            if isinstance(message, EngineRequest):
                self._add(message)
            elif isinstance(message, Abort):
                self._core.abort(message)
                self._send(EngineOutputs(stats=self._core.stats()))
            elif isinstance(message, ClientGone):
                self._remove_client(message.client)
            elif isinstance(message, ResetPrefixCache):
                self._core.reset_prefix_cache()
                for client in list(self._outboxes):
                    self._send(PrefixCacheCleared(), client)
            elif isinstance(message, ListRequests):
                self._send_request_list(self._core.live_requests(), message)
            elif isinstance(message, EndRequests):
                ended, messages = self._core.end_requests(message.id)
                self._send_all(messages)
                self._send_request_list(ended, message)
            elif isinstance(message, StepProbe):
                self._probe_step(message.client)
            elif isinstance(message, Operate):
                self._core.operate(message)
            elif isinstance(message, GiveFeature):
                data = self._inbox.recv() if message.is_found else None
                features = self._core.features
                features.receive(message.digest, message.client, data, message.error)
            elif isinstance(message, Ping):
                self._send(Pong())
            else:
                assert isinstance(message, Stop)
                return False
        return True

    def _wait_for_requests(self) -> bool:
        """Handle messages until the next step must be launched. Returns False after a Stop."""
        while milliseconds := int(self._core.spare_seconds * 1000):
            if self._inbox.poll(milliseconds) and not self._handle_messages():
                return False
        return True

    def _send_request_list(
        self, requests: list[RequestInfo], asked: ListRequests | EndRequests
    ) -> None:
        self._send(
            RequestList(asked.ticket, requests, self._core.scheduler.pool.usage), asked.client
        )

    def _add(self, request: EngineRequest) -> None:
        if request.client in self._gone_clients:
            return
        try:
            self._core.add(request)
        except ValueError as error:
            failed = [
                EngineOutput(request.number + i, [], finish_reason="error", error=str(error))
                for i in range(request.num_sequences)
            ]
            self._send(EngineOutputs(failed), request.client)

    def _require_a_step(self, folder: str) -> None:
        """Raise CheckpointError if a step for one token fails: every later one would, too."""
        self._probe_step(CANARY)
        while self._core.has_work:
            self._core.launch()
            self._core.collect()
        self._probing_clients.clear()
        self._core.remove_client(CANARY)
        if self._core.failure is not None:
            raise CheckpointError(
                f"{folder} cannot be served: its first step fails: {self._core.failure}. Fetch or "
                "copy its weights again. If --dtype is float16, try bfloat16 or float32."
            )

    def _probe_step(self, client: int) -> None:
        """Report to the client after the next step. Without work, add a one-token request."""
        if not self._core.has_work:
            info, features = self._core.executor.info, tuple[Feature, ...]()
            if info.hearing is not None:
                silence = Clip.of(np.zeros(1, np.int16))
                features = (feature_of(silence),)
                self._core.features.data[silence.digest] = silence.data
            self._core.add(
                EngineRequest(
                    id="canary",
                    client=CANARY,
                    spec=SequenceSpec(
                        prompt_token_ids=[0],
                        params=SamplingParams(max_tokens=1, temperature=0.0, seed=0),
                        max_tokens=1,
                        eos_token_ids=[],
                        pooling=None if info.generates else PoolingParams(),
                        features=features,
                    ),
                )
            )
        self._probing_clients.add(client)

    def _report_steps(self, outputs: dict[int, EngineOutputs]) -> None:
        """Send a step's results and a StepReport to the clients that wait for one."""
        outputs.pop(CANARY, None)
        self._send_all(outputs)
        outputs.clear()
        for client in self._probing_clients:
            self._send(StepReport(self._core.failure), client)
        self._probing_clients.clear()
        self._core.remove_client(CANARY)

    def _exit_with_error(self, kind: str, message: str) -> None:
        """Send the error that ended the engine to client 0 and exit.

        Called from a thread other than the stuck one."""
        context = zmq.Context()
        outbox = open_socket(context, zmq.PUSH)
        outbox.connect(address(self._sockets, "out0"))
        outbox.send(msgspec.msgpack.encode(Failed(kind, message)))
        context.destroy(linger=2000)  # returns once it is sent
        flush_stderr()
        os._exit(1)

    def _remove_client(self, client: int) -> None:
        """End the requests of a client that has exited."""
        self._gone_clients.add(client)
        if count := self._core.remove_client(client):
            logger.warning("%d sequences of an API worker that has exited were ended", count)
        outbox = self._outboxes.pop(client, None)
        if outbox is not None:
            outbox.close(linger=0)
        self._send(EngineOutputs(stats=self._core.stats()))

    def _send_all(self, messages: dict[int, EngineOutputs]) -> None:
        for client, message in messages.items():
            self._send(message, client)

    def _send(self, message: FromCore, client: int = 0) -> None:
        if client in self._gone_clients:
            return
        outbox = self._outboxes.get(client)
        if outbox is None:
            outbox = self._outboxes[client] = open_socket(self._context, zmq.PUSH)
            outbox.connect(address(self._sockets, f"out{client}"))
        outbox.send(self._encoder.encode(message))


def tokenizer_folder(start: StartCore) -> Path:
    tokenizer = start.config.model.tokenizer
    return Path(start.folder) if tokenizer is None else locate_tokenizer(tokenizer)


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def main() -> None:
    # The front end handles these signals and sends Stop after draining. The core runs until then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sockets = sys.argv[1]
    exit_with_parent(lambda: shutil.rmtree(sockets, ignore_errors=True))
    CoreProcess(sockets).run()


if __name__ == "__main__":
    main()
