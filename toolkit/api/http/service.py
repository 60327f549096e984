"""The served model, as the routes use it."""

import time
from collections.abc import Awaitable, Callable
from copy import copy
from dataclasses import dataclass, field

from starlette.requests import Request

from toolkit.api.http.body_fields import Body, check_fields
from toolkit.api.http.plugins import FrontEndPlugins
from toolkit.config import ServerConfig
from toolkit.engine.async_llm import AsyncLLM
from toolkit.errors import ModelNotFoundError
from toolkit.metrics.shared import SharedReading
from toolkit.sequence import Adapter
from toolkit.text.template_pool import TemplatePool


@dataclass(slots=True)
class Service:
    """The served model."""

    engine: AsyncLLM
    model_names: tuple[str, ...]  # the first is in answers
    created: int = field(default_factory=lambda: int(time.time()))
    expose: Callable[[], Awaitable[bytes]] | None = None
    """Collects the metrics of all processes, if the server has several."""
    config: ServerConfig = field(default_factory=ServerConfig)
    templates: TemplatePool = field(default_factory=TemplatePool)

    plugins: FrontEndPlugins = field(default_factory=FrontEndPlugins)
    adapter: Adapter | None = None
    """The LoRA adapter that a request names as its model."""
    base_name: str = ""  # of the model, if there is an adapter
    metrics: SharedReading[bytes] = field(init=False)
    """Metrics of all processes in Prometheus' text format."""

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    def __post_init__(self) -> None:
        self.metrics = SharedReading(self._expose)

    async def _expose(self) -> bytes:
        return self.engine.metrics.expose() if self.expose is None else await self.expose()

    def with_adapter(self, name: str | None) -> "Service":
        """Return the service as a request sees it that names this model."""
        if name is None or name in self.model_names:
            return self
        adapter = self.engine.adapters.find(name)
        if adapter is None:
            return self
        own = copy(self)
        own.adapter, own.base_name, own.model_names = adapter, self.model_name, (name,)
        return own

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFoundError for the name of another model. None is the served model.

        Without --served-model-name, MODEL as given is a name, too."""
        as_given = () if self.config.served_model_name else (self.engine.config.model.model,)
        if not name or name in (*self.model_names, *as_given):
            return
        adapters = self.engine.adapters
        if adapters.find(name) is None:
            served = ", ".join(map(repr, (*self.model_names, *adapters.names)))
            raise ModelNotFoundError(
                f"The model {name!r} is not served here. Served: {served}.",
                param="model",
                code="model_not_found",
            )


def service_for(request: Request, body: Body) -> Service:
    """Return the service for a request.

    Raises ModelNotFoundError if the request names another model, and InvalidRequestError for an
    unknown field if the server is strict."""
    service: Service = request.app.state.service
    check_fields(request, body, strict=service.config.strict)
    name = getattr(body, "model", None)
    service.check_model(name)
    return service.with_adapter(name)
