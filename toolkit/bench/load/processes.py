"""Clients in processes of their own: the first process hands out the shares, says when to begin, and gathers what came.

They speak MessagePack through the pipes of standard input and output. A client ends when its standard input does.
"""

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

from toolkit.bench.load.answer_stream import Counts
from toolkit.bench.load.client import Clock
from toolkit.bench.load.event_loop import event_loop_factory, raise_file_limit
from toolkit.bench.load.http_client import Http
from toolkit.bench.load.record import RequestRecord, Seconds, Share
from toolkit.bench.load.share import Job, LoadShare
from toolkit.config.load import BenchConfig

HEAD_START = 0.05
"""Seconds between the word to begin and the beginning, so that all clients begin together."""

REFRESH = 0.25
"""Seconds between two reports of a client's counts."""


class Ready(msgspec.Struct, tag="ready"):
    """The client has made its requests."""


class Begin(msgspec.Struct, tag="begin"):
    """`at`: the moment that counts as 0, by `time.perf_counter`, which all processes share."""

    at: float


class Stop(msgspec.Struct, tag="stop"):
    """Report what there is."""


class Done(msgspec.Struct, tag="done"):
    """The client's share, at its end."""

    records: list[RequestRecord]
    loop_delays: Seconds
    cpu_share: float


ToClient = Job | Begin | Stop
FromClient = Ready | Counts | Done


def _enc_hook(value: Any) -> bytes:
    if isinstance(value, array):
        return value.typecode.encode() + value.tobytes()
    raise NotImplementedError


def _dec_hook(kind: Any, value: bytes) -> array[Any]:
    return array(chr(value[0]), value[1:])


_encoder = msgspec.msgpack.Encoder(enc_hook=_enc_hook)
_from_client = msgspec.msgpack.Decoder(FromClient, dec_hook=_dec_hook)
_to_client = msgspec.msgpack.Decoder(ToClient)


def _frame(message: ToClient | FromClient) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "big") + body


async def _read(stream: asyncio.StreamReader) -> bytes:
    """One frame's body. Raises IncompleteReadError at the end of the stream."""
    return await stream.readexactly(int.from_bytes(await stream.readexactly(4), "big"))


class ClientProcesses:
    """The first process's side: `clients` processes, each with a share."""

    def __init__(self, processes: Sequence[Process]) -> None:
        self._processes = processes
        self._counts = [Counts() for _ in processes]
        self.clock = Clock()

    @classmethod
    @asynccontextmanager
    async def started(
        cls, config: BenchConfig, model: str, clients: int
    ) -> AsyncIterator[ClientProcesses]:
        """Starts the processes and waits until all are ready to begin; ends them with the block."""
        processes: list[Process] = []
        try:
            for index in range(clients):
                processes.append(
                    await asyncio.create_subprocess_exec(
                        *(sys.executable, "-m", "toolkit.bench.load.processes"),
                        stdin=PIPE,
                        stdout=PIPE,
                        start_new_session=True,  # Ctrl-C is for the first process, which says when to stop
                    )
                )
                _tell(processes[-1], Job(config, model, index, clients))
            for process in processes:
                message = await _hear(process)
                assert isinstance(message, Ready), "a client speaks first when it is ready"
            yield cls(processes)
        finally:
            for process in processes:
                if process.returncode is None:
                    process.kill()
            await asyncio.gather(*(process.wait() for process in processes))

    @property
    def counts(self) -> Counts:
        """The sums of what the clients last reported."""
        total = Counts()
        for one in self._counts:
            for name in ("sent", "done", "failed", "tokens", "first_tokens", "ttft"):
                setattr(total, name, getattr(total, name) + getattr(one, name))
            total.error = one.error or total.error
        return total

    async def run(self, stop: asyncio.Event) -> list[Share]:
        """Lets all begin, and waits for their shares. After `stop` they come as they are."""
        begin = Begin(time.perf_counter() + HEAD_START)
        self.clock = Clock(begin.at)
        for process in self._processes:
            _tell(process, begin)
        stopping = asyncio.create_task(self._forward(stop))
        try:
            return await asyncio.gather(*(self._gather(i) for i in range(len(self._processes))))
        finally:
            stopping.cancel()

    async def _gather(self, index: int) -> Share:
        while True:
            message = await _hear(self._processes[index])
            if isinstance(message, Done):
                return Share(message.records, message.loop_delays, message.cpu_share)
            if isinstance(message, Counts):
                self._counts[index] = message

    async def _forward(self, stop: asyncio.Event) -> None:
        await stop.wait()
        for process in self._processes:
            _tell(process, Stop())


def _tell(process: Process, message: ToClient) -> None:
    assert process.stdin is not None
    process.stdin.write(_frame(message))


async def _hear(process: Process) -> FromClient:
    assert process.stdout is not None
    try:
        message: FromClient = _from_client.decode(await _read(process.stdout))
    except asyncio.IncompleteReadError:
        raise RuntimeError(
            f"a client process ended with exit code {await process.wait()}; what it wrote to stderr says why"
        ) from None
    return message


async def _client() -> None:
    """A client process, from its job to its share."""
    orders = await _standard_input()
    job = _to_client.decode(await _read(orders))
    assert isinstance(job, Job), "the first order is the job"
    async with Http(job.config.url, job.config.api_key, job.config.header) as http:
        share = LoadShare(job, http)
        _say(Ready())
        begin = _to_client.decode(await _read(orders))
        assert isinstance(begin, Begin), "the second order is to begin"
        client = share.start(Clock(begin.at))
        stop = asyncio.Event()
        helpers = [
            asyncio.create_task(_obey(orders, stop)),
            asyncio.create_task(_report(client.counts)),
        ]
        result = await share.run(stop)
        for helper in helpers:
            helper.cancel()
        _say(Done(result.records, result.loop_delays, result.cpu_share))


async def _standard_input() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer
    )
    return reader


async def _obey(orders: asyncio.StreamReader, stop: asyncio.Event) -> None:
    try:
        while not isinstance(_to_client.decode(await _read(orders)), Stop):
            pass
    except asyncio.IncompleteReadError:
        pass  # the first process has gone
    stop.set()


async def _report(counts: Counts) -> None:
    while True:
        await asyncio.sleep(REFRESH)
        _say(counts)


def _say(message: FromClient) -> None:
    sys.stdout.buffer.write(_frame(message))
    sys.stdout.buffer.flush()


def main() -> None:
    raise_file_limit()
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        try:
            runner.run(_client())
        except (asyncio.IncompleteReadError, BrokenPipeError):
            sys.exit(1)  # the first process has gone


if __name__ == "__main__":
    main()
