"""The served model, as every route sees it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from starlette.requests import Request

from toolkit.api.http.body_fields import Body, check_fields
from toolkit.config import ServerConfig
from toolkit.engine.async_llm import AsyncLLM
from toolkit.errors import ModelNotFoundError


@dataclass(slots=True)
class Service:
    """One served model."""

    engine: AsyncLLM
    model_name: str
    created: int = field(default_factory=lambda: int(time.time()))
    expose: Callable[[], Awaitable[bytes]] | None = None
    """Gathers the metrics of all of the server's processes, when there are several."""
    config: ServerConfig = field(default_factory=ServerConfig)

    async def metrics(self) -> bytes:
        """The whole server's metrics in Prometheus' text format."""
        return self.engine.metrics.expose() if self.expose is None else await self.expose()

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFoundError when a request asks for another model than the served one; none is the
        served one.
        """
        known = {self.model_name, self.engine.config.model.model or self.model_name}
        if name and name not in known:
            raise ModelNotFoundError(
                f"The model {name!r} is not served here; {self.model_name!r} is.",
                param="model",
                code="model_not_found",
            )


def service_for(request: Request, body: Body) -> Service:
    """The service that a request is for. Raises ModelNotFoundError when it asks for another model, and, when the
    server is strict, InvalidRequestError for a field that it does not know.
    """
    service: Service = request.app.state.service
    check_fields(request, body, strict=service.config.strict)
    service.check_model(getattr(body, "model", None))
    return service
