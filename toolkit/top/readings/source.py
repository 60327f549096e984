"""Sources of readings: a server over HTTP."""

import time
from typing import Any, Protocol
from urllib.parse import quote

import httpx
import msgspec

from toolkit.client.trust import TRUST, Trust, unreachable, why_untrusted
from toolkit.client.wire import ServerError, error_message, goes_through_proxy
from toolkit.top.readings.parse import Parser
from toolkit.top.readings.reading import LiveRequest, Reading

TIMEOUT = 5.0  # seconds
NO_LIST = "Live requests cannot be listed: only tk servers have /tk/requests."
NEEDS_KEY = "Live requests need the operator's key: set --admin-key."


class Source(Protocol):
    """One server. If it does not answer, `read` returns a reading with an error."""

    url: str

    def now(self) -> float:
        """Return the time on the clock of the readings."""

    async def read(self, *, requests: bool) -> Reading | None:
        """Read the server, optionally with its live requests. None: end of a recording."""

    async def abort(self, id: str) -> None:
        """End a live request. Raises ToolkitError if that fails."""

    async def close(self) -> None:
        """Close the connection."""


class LiveRequests(msgspec.Struct):
    """Body of /tk/requests."""

    requests: list[LiveRequest]


class HTTPSource:
    """A server's `/metrics`, and the live requests and settings of a tk server.

    `transport` replaces the network in tests."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        admin_key: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        trust: Trust = TRUST,
    ) -> None:
        self.url = url
        key = admin_key or api_key
        self.http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=TIMEOUT,
            transport=transport,
            verify=trust.context() if transport is None else False,  # the transport's
            trust_env=goes_through_proxy(url),
            follow_redirects=True,
        )
        self._parser = Parser()
        self._model = self._version = ""
        self._connected = False

    def now(self) -> float:
        return time.monotonic()

    async def read(self, *, requests: bool) -> Reading:
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
            self._connected = False  # the next server at this URL may be another one
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
            await self._read_info(reading)
        reading.model, reading.version = self._model or metrics.model, self._version
        if requests:
            reading.requests, reading.no_requests = await self._requests()
        return reading

    async def abort(self, id: str) -> None:
        response = await self._request("DELETE", f"/tk/requests/{quote(id, safe='')}")
        if response.status_code != 200:
            raise ServerError(error_message(response.content))

    async def close(self) -> None:
        await self.http.aclose()

    async def _read_info(self, reading: Reading) -> None:
        """Read model, version and settings, if the server has them."""
        models = await self._json("/v1/models")
        version = await self._json("/version")
        try:
            self._model = str(models["data"][0]["id"])
        except (LookupError, TypeError):
            self._model = ""
        self._version = str(version.get("version", "")) if isinstance(version, dict) else ""
        reading.settings = _by_section(await self._json("/server_info"))
        self._connected = True

    async def _requests(self) -> tuple[list[LiveRequest] | None, str]:
        """Return (live requests, "") or (None, reason)."""
        try:
            response = await self._get("/tk/requests")
            if response.status_code in (401, 403):
                return None, NEEDS_KEY
            if response.status_code in (404, 405):
                return None, NO_LIST
            if response.status_code != 200:
                reason = error_message(response.content)
                return None, f"/tk/requests answered HTTP {response.status_code}: {reason}"
            return msgspec.json.decode(response.content, type=LiveRequests).requests, ""
        except ServerError as error:
            return None, error.message
        except msgspec.MsgspecError:
            return None, NO_LIST

    async def _json(self, path: str) -> Any:
        """Return a decoded JSON body, or None without one."""
        try:
            response = await self._get(path)
            return msgspec.json.decode(response.content) if response.status_code == 200 else None
        except (ServerError, msgspec.MsgspecError):
            return None

    async def _get(self, path: str) -> httpx.Response:
        return await self._request("GET", path)

    async def _request(self, method: str, path: str) -> httpx.Response:
        try:
            return await self.http.request(method, path)
        except httpx.TimeoutException:
            raise ServerError(f"{self.url} did not answer within {TIMEOUT:g} s.") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            if why_untrusted(error) is not None:
                raise unreachable(self.url, error) from None
            raise ServerError(f"No server answers at {self.url} ({error}).") from None


def _by_section(info: Any) -> dict[str, Any] | None:
    """Return the settings in /server_info with the sections of the models.

    Those of the first model have their own names, those of others the model's name in addition."""
    if not isinstance(info, dict):
        return None
    found = {name: info[name] for name in ("version", "server") if name in info}
    models = info.get("models")
    for model in models if isinstance(models, list) else ():
        if not isinstance(model, dict):
            continue
        engine = model.get("engine")
        if "engine" not in found:
            found |= {"engine": engine, "device": model.get("device")}
        elif isinstance(found["engine"], dict) and isinstance(engine, dict):
            named = {f"{part} ({model.get('model')})": values for part, values in engine.items()}
            found["engine"] = found["engine"] | named
    return found
