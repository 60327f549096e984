"""Where the readings come from: a server over HTTP."""

from __future__ import annotations

import time
from typing import Any, Protocol
from urllib.parse import quote

import httpx
import msgspec

from toolkit.client.wire import ServerError, error_message, goes_through_proxy
from toolkit.top.readings.parse import Parser
from toolkit.top.readings.reading import LiveRequest, Reading

TIMEOUT = 5.0  # seconds
OTHER_SERVER = "Live requests are not told: only tk servers have /tk/requests."
WANTS_KEY = "Live requests are told to the operator alone: give the key with --admin-key."


class Source(Protocol):
    """One server. That it is gone is no exception but a reading with an error."""

    url: str

    def now(self) -> float:
        """The time on the clock of the readings."""

    async def read(self, *, requests: bool) -> Reading | None:
        """How things stand; with the live requests, on request. None: there is nothing more to come."""

    async def abort(self, id: str) -> None:
        """Ends a live request. Raises ToolkitError when that did not work."""

    async def close(self) -> None:
        """Lets go of the connection."""


class Listing(msgspec.Struct):
    """The body of /tk/requests."""

    requests: list[LiveRequest]


class HTTPSource:
    """A server's `/metrics`, and what a tk server tells beside them. `transport` stands in for the network in tests."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        admin_key: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = url
        key = admin_key or api_key
        self.http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=TIMEOUT,
            transport=transport,
            trust_env=goes_through_proxy(url),
            follow_redirects=True,
        )
        self._parser = Parser()
        self._model = self._version = ""
        self._connected = False

    def now(self) -> float:
        """See Source."""
        return time.monotonic()

    async def read(self, *, requests: bool) -> Reading:
        """See Source."""
        try:
            response = await self._get("/metrics")
            if response.status_code != 200:
                reason = error_message(response.content)
                raise ServerError(
                    f"{self.url}/metrics answered HTTP {response.status_code}: {reason}"
                )
            taken = time.monotonic()
            metrics = self._parser.parse(response.text)
        except ServerError as error:
            self._connected = False  # another server may stand there when it comes back
            return Reading(self.url, time.monotonic(), time.time(), error=error.message)
        reading = Reading(
            self.url,
            taken,
            time.time(),
            numbers=metrics.numbers,
            parts=metrics.parts,
            histograms=metrics.histograms,
            labels=metrics.labels,
        )
        if not self._connected:
            await self._introduce(reading)
        reading.model, reading.version = self._model or metrics.model, self._version
        if requests:
            reading.requests, reading.no_requests = await self._requests()
        return reading

    async def abort(self, id: str) -> None:
        """See Source."""
        response = await self._ask("DELETE", f"/tk/requests/{quote(id, safe='')}")
        if response.status_code != 200:
            raise ServerError(error_message(response.content))

    async def close(self) -> None:
        """See Source."""
        await self.http.aclose()

    async def _introduce(self, reading: Reading) -> None:
        """Model, version and settings, as far as the server tells them."""
        models = await self._json("/v1/models")
        version = await self._json("/version")
        try:
            self._model = str(models["data"][0]["id"])
        except (LookupError, TypeError):
            self._model = ""
        self._version = str(version.get("version", "")) if isinstance(version, dict) else ""
        settings = await self._json("/server_info")
        reading.settings = settings if isinstance(settings, dict) else None
        self._connected = True

    async def _requests(self) -> tuple[list[LiveRequest] | None, str]:
        """(live requests, "") or (None, why there are none to be had)."""
        try:
            response = await self._get("/tk/requests")
            if response.status_code in (401, 403):
                return None, WANTS_KEY
            if response.status_code in (404, 405):
                return None, OTHER_SERVER
            if response.status_code != 200:
                return (
                    None,
                    f"/tk/requests answered HTTP {response.status_code}: {error_message(response.content)}",
                )
            return msgspec.json.decode(response.content, type=Listing).requests, ""
        except ServerError as error:
            return None, error.message
        except msgspec.MsgspecError:
            return None, OTHER_SERVER

    async def _json(self, path: str) -> Any:
        """A body, or None when there is none to be had."""
        try:
            response = await self._get(path)
            return msgspec.json.decode(response.content) if response.status_code == 200 else None
        except (ServerError, msgspec.MsgspecError):
            return None

    async def _get(self, path: str) -> httpx.Response:
        return await self._ask("GET", path)

    async def _ask(self, method: str, path: str) -> httpx.Response:
        try:
            return await self.http.request(method, path)
        except httpx.TimeoutException:
            raise ServerError(f"{self.url} did not answer within {TIMEOUT:g} s.") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise ServerError(f"No server answers at {self.url} ({error}).") from None
