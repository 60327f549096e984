"""Sends requests and times their answers. Bytes are timed when read, before they are parsed."""

import asyncio
import time

import orjson

from toolkit.bench.load.answer_stream import LiveCounts, StreamTimer
from toolkit.bench.load.dataset import BenchRequest
from toolkit.bench.load.http_client import HTTPClient
from toolkit.bench.load.record import RequestRecord
from toolkit.client.wire import RequestFailedError, ServerError, error_message

READY_CHECK_INTERVAL = 0.5  # seconds between attempts to reach a server that is starting


class Clock:
    """Seconds since `start`, by `time.perf_counter`, which all processes of a machine share."""

    def __init__(self, start: float | None = None) -> None:
        self.start = time.perf_counter() if start is None else start

    def __call__(self) -> float:
        return time.perf_counter() - self.start


async def wait_until_ready(http: HTTPClient, url: str, patience: float) -> None:
    """Wait until the server answers, for at most `patience` seconds.

    During that time an HTTP error of 500 or above is no answer: a proxy sends one for a server that
    is still starting. Raises ServerError."""
    end = time.perf_counter() + patience
    while True:
        try:
            status, _ = await http.get("/v1/models", timeout=30.0)
            if status < 500 or time.perf_counter() >= end:
                return
        except RequestFailedError as error:
            if time.perf_counter() >= end:
                waited = f" after {patience:g} s" if patience else ""
                raise ServerError(
                    f"No server answers at {url}{waited} ({error.example}). "
                    "Start one with 'tk serve', or set --url."
                ) from None
        await asyncio.sleep(min(READY_CHECK_INTERVAL, max(0.0, end - time.perf_counter())))


async def first_model(http: HTTPClient, url: str) -> str:
    """Return the first model that the server lists. Raises ServerError if it lists none."""
    try:
        status, body = await http.get("/v1/models", timeout=30.0)
    except RequestFailedError as error:
        raise ServerError(f"{url}/v1/models: {error.cause}: {error.example}.") from None
    if status != 200:
        raise ServerError(f"{url}/v1/models answered HTTP {status}: {error_message(body)}")
    try:
        return str(orjson.loads(body)["data"][0]["id"])
    except (orjson.JSONDecodeError, LookupError, TypeError):
        raise ServerError(f"{url}/v1/models lists no model. Set --model.") from None


class Client:
    """Sends requests to one route and counts them."""

    def __init__(self, http: HTTPClient, route: str, clock: Clock) -> None:
        self.http = http
        self.route = route
        self.clock = clock
        self.counts = LiveCounts()

    async def send(self, request: BenchRequest, record: RequestRecord) -> None:
        """Send the request now and fill the record. A failure is stored in the record."""
        counts, timer = self.counts, StreamTimer(record, self.clock.start, self.counts)
        record.max_tokens = request.max_tokens
        counts.sent += 1
        record.sent = self.clock()
        try:
            status, body = await self.http.post(
                self.route, request.body, timer.feed, request.content_type
            )
            if status == 200:
                timer.check_complete()
            else:
                record.error = (f"HTTP {status}", error_message(body))
        except RequestFailedError as error:
            record.error = (error.cause, error.example)
        except asyncio.CancelledError:
            counts.sent -= 1
            raise
        finally:
            timer.write_record()
        record.ended = self.clock()
        if record.error is None:
            counts.done += 1
        else:
            counts.failed += 1
            counts.error = record.error[0]
