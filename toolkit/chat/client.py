"""Asks an OpenAI-compatible server and gives its answer piece by piece."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import httpx

from toolkit.chat.delta import Delta, read_delta
from toolkit.client.wire import DONE, EventBuffer, ServerError, error_message, goes_through_proxy

TIMEOUT = httpx.Timeout(
    10.0, read=None
)  # a long queue or a long thought is no failure; Ctrl-C ends the wait


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a server tells of a model."""

    name: str
    max_context: int | None = None  # tokens
    takes_images: bool | None = None  # None: it does not say


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is, and what it wants to see first."""

    url: str
    api_key: str | None = None

    def http(self) -> dict[str, Any]:
        """Arguments of an httpx client."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key is not None else {}
        trust_env = goes_through_proxy(self.url)
        return {
            "base_url": self.url,
            "headers": headers,
            "timeout": TIMEOUT,
            "trust_env": trust_env,
        }

    def models(self) -> list[ModelCard]:
        """Every model that the server lists, in its order. Raises ServerError, also when there is none."""
        try:
            with httpx.Client(**self.http()) as http:
                response = http.get("/v1/models", timeout=10.0)
        except httpx.HTTPError as error:
            raise self.unreachable(error) from None
        if response.status_code != 200:
            raise self.refused(response.status_code, response.content)
        try:
            cards = [_card(model) for model in response.json()["data"]]
        except (ValueError, LookupError, TypeError, AttributeError):
            cards = []
        if not cards:
            raise ServerError(f"{self.url} lists no model: it is not an OpenAI-compatible server.")
        return cards

    def unreachable(self, error: Exception) -> ServerError:
        return ServerError(f"No server answers at {self.url} ({error}). 'tk serve' starts one.")

    def refused(self, status: int, body: bytes) -> ServerError:
        reason = error_message(body)
        if status in (401, 403):
            return ServerError(
                f"The server at {self.url} wants another API key (--api-key): {reason}"
            )
        return ServerError(f"The server at {self.url} refused (HTTP {status}): {reason}")


class ChatClient:
    """Requests to one server. It belongs to one event loop."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.http = httpx.AsyncClient(**address.http())

    async def close(self) -> None:
        await self.http.aclose()

    async def ask(self, body: dict[str, Any]) -> AsyncGenerator[Delta]:
        """The answer to a request, piece by piece. Cancelling it closes the connection, which ends the answer on
        the server.

        Raises ServerError when the server cannot be reached, refuses, or breaks off.
        """
        try:
            async with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise self.address.refused(response.status_code, await response.aread())
                if body["stream"]:
                    async for delta in self._pieces(response):
                        yield delta
                else:
                    yield read_delta(await response.aread())
        except httpx.ConnectError as error:
            raise self.address.unreachable(error) from None
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise ServerError(
                f"The connection to {self.address.url} broke off ({reason})."
            ) from None

    async def _pieces(self, response: httpx.Response) -> AsyncGenerator[Delta]:
        events = EventBuffer()
        ended = False
        async for data in response.aiter_bytes():
            for event in events.feed(data):
                if event == DONE:
                    return
                delta = read_delta(event)
                ended |= delta.finish_reason is not None
                yield delta
        if not ended:
            raise ServerError("The server broke the answer off.")


def _card(model: dict[str, Any]) -> ModelCard:
    """Of what servers write: vLLM and tk, OpenRouter, llama.cpp, Mistral."""
    context = (
        model.get("max_model_len")
        or model.get("context_length")
        or (model.get("meta") or {}).get("n_ctx")
    )
    modalities = model.get("input_modalities") or (model.get("architecture") or {}).get(
        "input_modalities"
    )
    capabilities = model.get("capabilities")
    takes_images = None
    if isinstance(modalities, list):
        takes_images = "image" in modalities
    elif isinstance(capabilities, list):
        takes_images = "multimodal" in capabilities or "vision" in capabilities
    elif isinstance(capabilities, dict) and "vision" in capabilities:
        takes_images = bool(capabilities["vision"])
    return ModelCard(str(model["id"]), int(context) if context else None, takes_images)
