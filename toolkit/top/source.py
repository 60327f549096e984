"""Where the readings come from."""

from __future__ import annotations

import time
from dataclasses import dataclass

import httpx

from toolkit.bench.wire import ServerError, error_message, goes_through_proxy
from toolkit.top.scrape import Scrape, parse

TIMEOUT = 5.0  # seconds


@dataclass(frozen=True, slots=True)
class Identity:
    """What a server says about itself; None where it says nothing."""

    model: str | None = None
    version: str | None = None


class Source:
    """One server. `transport` stands in for the network in tests."""

    def __init__(
        self, url: str, api_key: str | None, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.url = url
        headers = {"Authorization": f"Bearer {api_key}"} if api_key is not None else {}
        self.http = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=TIMEOUT,
            transport=transport,
            trust_env=goes_through_proxy(url),
            follow_redirects=True,
        )

    async def scrape(self) -> Scrape:
        """The metrics now. Raises ServerError when there are none to be had."""
        response = await self._get("/metrics")
        if response.status_code != 200:
            reason = error_message(response.content)
            raise ServerError(f"{self.url}/metrics answered HTTP {response.status_code}: {reason}")
        return parse(response.text, time.monotonic())

    async def identity(self) -> Identity:
        """Model and version. Never raises for what the server does not tell."""
        return Identity(
            model=await self._field("/v1/models", "data", 0, "id"),
            version=await self._field("/version", "version"),
        )

    async def close(self) -> None:
        await self.http.aclose()

    async def _field(self, path: str, *keys: str | int) -> str | None:
        try:
            value = (await self._get(path)).json()
            for key in keys:
                value = value[key]
        except (ServerError, ValueError, LookupError, TypeError):
            return None
        return str(value)

    async def _get(self, path: str) -> httpx.Response:
        try:
            return await self.http.get(path)
        except httpx.TimeoutException:
            raise ServerError(f"{self.url} did not answer within {TIMEOUT:g} s.") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise ServerError(f"No server answers at {self.url} ({error}).") from None
