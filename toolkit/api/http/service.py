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
from toolkit.engine.front.request_stats import current_stats
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

    def with_adapter(self, adapter: Adapter) -> "Service":
        """Return the service as a request sees it that names this adapter."""
        own = copy(self)
        own.adapter, own.base_name, own.model_names = adapter, self.model_name, (adapter.name,)
        return own

    def is_base(self, name: str) -> bool:
        """Return True for a name of the model itself.

        Without --served-model-name, MODEL as given is a name, too."""
        is_given = not self.config.served_model_name and name == self.engine.config.model.model
        return is_given or name in self.model_names

    def check_model(self, name: str | None) -> Adapter | None:
        """Return the adapter of this name, None for the served model, whose name may be left out.

        Raises ModelNotFoundError for the name of another model."""
        if not name or self.is_base(name):
            return None
        adapters = self.engine.adapters
        adapter = adapters.find(name)
        if adapter is None:
            served = adapters.describe_names(*self.model_names)
            message = f"The model {name!r} is not served here. Served: {served}."
            raise ModelNotFoundError(
                adapters.explain_missing(name) or message, param="model", code="model_not_found"
            )
        return adapter


def service_for(request: Request, body: Body) -> Service:
    """Return the service for a request.

    Raises ModelNotFoundError if the request names another model, and InvalidRequestError for an
    unknown field if the server is strict."""
    service: Service = request.app.state.service
    check_fields(request, body, strict=service.config.strict)
    name = getattr(body, "model", None)
    adapter = service.check_model(name)
    if adapter is None:
        return service
    if (record := current_stats.get()) is not None:
        record.adapter = adapter.name
    return service.with_adapter(adapter)
