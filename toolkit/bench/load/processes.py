"""Client processes. The parent distributes the load, starts all clients and collects their results.

Messages are MessagePack over standard input and output. A client exits when its standard input
closes."""

from __future__ import annotations

import asyncio
import sys
import time
from array import array
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from toolkit.bench.load.answer_stream import LiveCounts
from toolkit.bench.load.client import Clock
from toolkit.bench.load.event_loop import event_loop_factory, raise_file_limit
from toolkit.bench.load.http_client import client_of
from toolkit.bench.load.record import ClientResult, RequestRecord, Seconds
from toolkit.bench.load.share import LoadJob, LoadShare
from toolkit.framing import frame, read_frame

START_DELAY = 0.05
"""Seconds from the start message to the start, so that all clients start together."""

REPORT_INTERVAL = 0.25  # seconds between reports of a client's counts


class ClientReady(msgspec.Struct, tag="ready"):
    """The client has prepared its requests."""


class StartLoad(msgspec.Struct, tag="start"):
    """Start the load. `at` is time 0, by `time.perf_counter`, which all processes share."""

    at: float


class StopLoad(msgspec.Struct, tag="stop"):
    """Cancel the load and report the result so far."""


class LoadDone(msgspec.Struct, tag="done"):
    """Result of a client."""

    records: list[RequestRecord]
    loop_delays: Seconds
    cpu_share: float


ToClient = LoadJob | StartLoad | StopLoad
FromClient = ClientReady | LiveCounts | LoadDone


def _enc_hook(value: Any) -> bytes:
    if isinstance(value, array):
        return value.typecode.encode() + value.tobytes()
    raise NotImplementedError


def _dec_hook(kind: Any, value: bytes) -> array[Any]:
    return array(chr(value[0]), value[1:])


_encoder = msgspec.msgpack.Encoder(enc_hook=_enc_hook)
_from_client = msgspec.msgpack.Decoder(FromClient, dec_hook=_dec_hook)
_to_client = msgspec.msgpack.Decoder(ToClient)


class ClientProcesses:
    """The parent's side of the client processes."""

    def __init__(self, processes: Sequence[Process]) -> None:
        self._processes = processes
        self._counts = [LiveCounts() for _ in processes]
        self.clock = Clock()

    @classmethod
    @asynccontextmanager
    async def started(cls, job: LoadJob, clients: int) -> AsyncIterator[ClientProcesses]:
        """Start the processes and wait until all are ready; kill them at the end of the block."""
        processes: list[Process] = []
        try:
            for index in range(clients):
                processes.append(
                    await asyncio.create_subprocess_exec(
                        *(sys.executable, "-m", "toolkit.bench.load.processes"),
                        stdin=PIPE,
                        stdout=PIPE,
                        start_new_session=True,  # only the parent gets Ctrl-C; it sends StopLoad
                    )
                )
                own = msgspec.structs.replace(job, index=index, clients=clients)
                _send(processes[-1], own)
            for process in processes:
                message = await _receive(process)
                assert isinstance(message, ClientReady), "a client's first message is ClientReady"
            yield cls(processes)
        finally:
            for process in processes:
                if process.returncode is None:
                    process.kill()
            await asyncio.gather(*(process.wait() for process in processes))

    @property
    def counts(self) -> LiveCounts:
        """Sums of the clients' latest reports."""
        total = LiveCounts()
        for one in self._counts:
            for name in ("sent", "done", "failed", "tokens", "first_tokens", "ttft"):
                setattr(total, name, getattr(total, name) + getattr(one, name))
            total.error = one.error or total.error
        return total

    async def run(self, stop: asyncio.Event) -> list[ClientResult]:
        """Start all clients and wait for their results. `stop` cancels the load."""
        start = StartLoad(time.perf_counter() + START_DELAY)
        self.clock = Clock(start.at)
        for process in self._processes:
            _send(process, start)
        stopping = asyncio.create_task(self._forward_stop(stop))
        try:
            return await asyncio.gather(
                *(self._receive_result(i) for i in range(len(self._processes)))
            )
        finally:
            stopping.cancel()

    async def _receive_result(self, index: int) -> ClientResult:
        while True:
            message = await _receive(self._processes[index])
            if isinstance(message, LoadDone):
                return ClientResult(message.records, message.loop_delays, message.cpu_share)
            if isinstance(message, LiveCounts):
                self._counts[index] = message

    async def _forward_stop(self, stop: asyncio.Event) -> None:
        await stop.wait()
        for process in self._processes:
            _send(process, StopLoad())


def _send(process: Process, message: ToClient) -> None:
    assert process.stdin is not None
    process.stdin.write(frame(_encoder.encode(message)))


async def _receive(process: Process) -> FromClient:
    assert process.stdout is not None
    try:
        message: FromClient = _from_client.decode(await read_frame(process.stdout))
    except asyncio.IncompleteReadError:
        raise RuntimeError(
            f"A client process ended with exit code {await process.wait()}; see its output above."
        ) from None
    return message


async def _run_client() -> None:
    """Run the job that the parent sends and report its result."""
    stdin = await _open_stdin()
    job = _to_client.decode(await read_frame(stdin))
    assert isinstance(job, LoadJob), "the first message is the job"
    async with client_of(job.config) as http:
        share = LoadShare(job, http)
        _reply(ClientReady())
        start = _to_client.decode(await read_frame(stdin))
        assert isinstance(start, StartLoad), "the second message starts the load"
        client = share.start(Clock(start.at))
        stop = asyncio.Event()
        helpers = [
            asyncio.create_task(_wait_for_stop(stdin, stop)),
            asyncio.create_task(_report_counts(client.counts)),
        ]
        result = await share.run(stop)
        for helper in helpers:
            helper.cancel()
        _reply(LoadDone(result.records, result.loop_delays, result.cpu_share))


async def _open_stdin() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer
    )
    return reader


async def _wait_for_stop(stdin: asyncio.StreamReader, stop: asyncio.Event) -> None:
    try:
        while not isinstance(_to_client.decode(await read_frame(stdin)), StopLoad):
            pass
    except asyncio.IncompleteReadError:
        pass  # the parent has exited
    stop.set()


async def _report_counts(counts: LiveCounts) -> None:
    while True:
        await asyncio.sleep(REPORT_INTERVAL)
        _reply(counts)


def _reply(message: FromClient) -> None:
    sys.stdout.buffer.write(frame(_encoder.encode(message)))
    sys.stdout.buffer.flush()


def main() -> None:
    raise_file_limit()
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        try:
            runner.run(_run_client())
        except (asyncio.IncompleteReadError, BrokenPipeError):
            sys.exit(1)  # the parent has exited


if __name__ == "__main__":
    main()
