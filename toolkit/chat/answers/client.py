"""Client of an OpenAI-compatible server that streams chat answers."""

import ssl
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import httpx

from toolkit.chat.answers.delta import ChatDelta, parse_delta
from toolkit.client.trust import TRUST, Trust, unreachable
from toolkit.client.wire import (
    DONE,
    EventBuffer,
    KeyRejectedError,
    ServerError,
    error_code,
    error_message,
    goes_through_proxy,
)

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For http://, without authorities: reading them takes 20 ms."""
TIMEOUT = httpx.Timeout(10.0, read=None)  # a queue or reasoning may take long; Ctrl-C ends the wait


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model as the server describes it."""

    name: str
    max_context: int | None = None  # tokens
    accepts_images: bool | None = None  # None: unknown
    root: str | None = None  # hub name or folder that a tk or vLLM server loaded
    tasks: tuple[str, ...] | None = None  # of a tk server


@dataclass(frozen=True, slots=True)
class Address:
    """A server's URL or socket, API key, and whom to trust."""

    url: str
    api_key: str | None = None
    trust: Trust = TRUST
    uds: str | None = None  # Unix socket, instead of the URL's host and port
    idle_timeout: float | None = None  # seconds without a request after which it ends

    def client(self) -> httpx.Client:
        options, transport = self._options(), None
        if self.uds is not None:
            transport = httpx.HTTPTransport(uds=self.uds, verify=options["verify"])
        return httpx.Client(transport=transport, **options)

    def async_client(self) -> httpx.AsyncClient:
        options, transport = self._options(), None
        if self.uds is not None:
            transport = httpx.AsyncHTTPTransport(uds=self.uds, verify=options["verify"])
        return httpx.AsyncClient(transport=transport, **options)

    def _options(self) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key is not None else {}
        return {
            "base_url": self.url,
            "headers": headers,
            "timeout": TIMEOUT,
            "trust_env": goes_through_proxy(self.url),
            "verify": self.trust.context() if self.url.startswith("https:") else NO_TLS,
        }

    @property
    def title(self) -> str:
        """Address for messages."""
        return self.url if self.uds is None else "a private server"

    @property
    def subject(self) -> str:
        """The server, at the beginning of a message."""
        return f"The server at {self.url}" if self.uds is None else "The private server"

    def list_models(self) -> list[ModelInfo]:
        """Return the server's models, in its order. Raises ServerError, also if there are none."""
        try:
            with self.client() as http:
                response = http.get("/v1/models", timeout=10.0)
        except httpx.HTTPError as error:
            raise self.unreachable(error) from None
        if response.status_code != 200:
            raise self.refused(response.status_code, response.content)
        try:
            models = [_parse_model(model) for model in response.json()["data"]]
        except (ValueError, LookupError, TypeError, AttributeError):
            models = []
        if not models:
            raise ServerError(
                f"{self.title} lists no models, so it is not an OpenAI-compatible server."
            )
        return models

    def unreachable(self, error: httpx.HTTPError) -> ServerError:
        if self.uds is None:
            return unreachable(self.url, error)
        return ServerError(
            "The private server has ended. 'tk chat MODEL' starts another, and continues the last "
            "conversation with -c."
        )

    def refused(self, status: int, body: bytes) -> ServerError:
        reason = error_message(body)
        if status in (401, 403):
            if status == 401 and not self.api_key:
                return KeyRejectedError(
                    f"{self.subject} needs an API key: --api-key or TK_API_KEY."
                )
            what = "rejected the API key" if self.api_key else "needs an API key"
            return KeyRejectedError(f"{self.subject} {what} (--api-key or TK_API_KEY): {reason}")
        return ServerError(
            f"{self.subject} refused the request (HTTP {status}): {reason}",
            code=error_code(body),
        )


class ChatClient:
    """Sends chat requests to one server. Belongs to one event loop."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.http = address.async_client()

    async def close(self) -> None:
        await self.http.aclose()

    async def ask(self, body: dict[str, Any]) -> AsyncGenerator[ChatDelta]:
        """Send a request and yield its answer. Cancelling ends the request on the server too.

        Raises ServerError if the server cannot be reached, refuses, or disconnects."""
        try:
            async with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise self.address.refused(response.status_code, await response.aread())
                if body["stream"]:
                    async for delta in self._stream(response):
                        yield delta
                else:
                    yield parse_delta(await response.aread())
        except httpx.ConnectError as error:
            raise self.address.unreachable(error) from None
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise ServerError(f"Lost the connection to {self.address.title} ({reason}).") from None

    async def _stream(self, response: httpx.Response) -> AsyncGenerator[ChatDelta]:
        events = EventBuffer()
        has_ended = False
        async for data in response.aiter_bytes():
            for event in events.feed(data):
                if event == DONE:
                    return
                delta = parse_delta(event)
                has_ended |= delta.finish_reason is not None
                yield delta
        if not has_ended:
            raise ServerError("The server closed the connection before the end of the answer.")


def _parse_model(model: dict[str, Any]) -> ModelInfo:
    """Read an entry of /v1/models as written by vLLM and tk, OpenRouter, llama.cpp or Mistral."""
    context = (
        model.get("max_model_len")
        or model.get("context_length")
        or (model.get("meta") or {}).get("n_ctx")
    )
    modalities = model.get("input_modalities") or (model.get("architecture") or {}).get(
        "input_modalities"
    )
    capabilities = model.get("capabilities")
    accepts_images = None
    if isinstance(modalities, list):
        accepts_images = "image" in modalities
    elif isinstance(capabilities, list):
        accepts_images = "multimodal" in capabilities or "vision" in capabilities
    elif isinstance(capabilities, dict) and "vision" in capabilities:
        accepts_images = bool(capabilities["vision"])
    tokens = int(context) if context else None
    tasks = None if model.get("owned_by") != "tk" else tuple(model.get("tasks", ()))
    return ModelInfo(str(model["id"]), tokens, accepts_images, model.get("root"), tasks)
