"""The server and the models that it serves, as the routes use them."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import msgspec
from starlette.requests import Request

from toolkit.api.http.body_fields import RequestBody, check_fields
from toolkit.api.http.plugins import FrontEndPlugins
from toolkit.api.http.stored_responses import Responses, ResponseStore
from toolkit.config import ServerConfig
from toolkit.engine.async_llm import AsyncLLM
from toolkit.engine.front.request_stats import current_stats
from toolkit.engine.messages import RequestList
from toolkit.errors import ConfigError, InvalidRequestError, ModelNotFoundError
from toolkit.metrics import Metrics
from toolkit.metrics.shared import SharedReading
from toolkit.sequence import Adapter
from toolkit.speech.pool import SoundPool
from toolkit.text.template_pool import TemplatePool
from toolkit.version import __version__


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Most requests that wait to run, and most tokens of their prompts."""

    requests: int
    tokens: int | None = None


@dataclass(frozen=True, eq=False)
class ServedModel:
    """An engine, and the names of its model."""

    engine: AsyncLLM
    names: tuple[str, ...]  # the first is in answers
    has_path_name: bool = True  # MODEL as given is a name, too
    limits: QueueLimits | None = None  # of this model; the server's hold for all models together

    @property
    def name(self) -> str:
        return self.names[0]

    @cached_property
    def fingerprint(self) -> str:
        """Identifies what decides the text for a seed: tk's version, model, settings, device."""
        facts = (__version__, asdict(self.engine.config), msgspec.to_builtins(self.engine.info))
        return f"fp_{hashlib.blake2b(repr(facts).encode(), digest_size=6).hexdigest()}"

    def has_name(self, name: str) -> bool:
        """Return True for a name of the model itself, not of an adapter."""
        return name in self.names or (self.has_path_name and name == self.engine.config.model.model)


@dataclass(frozen=True, slots=True)
class Target:
    """A model that a request names, or an adapter for it."""

    server: Server
    model: ServedModel
    adapter: Adapter | None = None

    @property
    def name(self) -> str:
        """Name for answers."""
        return self.model.name if self.adapter is None else self.adapter.name

    @property
    def engine(self) -> AsyncLLM:
        return self.model.engine


class BackgroundWork:
    """Answers that no connection waits for."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], object] = {}  # with their clients

    def __len__(self) -> int:
        return len(self._tasks)

    def count(self, client: object) -> int:
        """Return the number of a client's answers."""
        return sum(one == client for one in self._tasks.values())

    def start(self, work: Coroutine[None, None, None], client: object) -> None:
        task = asyncio.ensure_future(work)
        self._tasks[task] = client
        task.add_done_callback(self._tasks.pop)


class Server:
    """Has what all models share, and the models."""

    def __init__(
        self,
        config: ServerConfig,
        models: Sequence[ServedModel],
        *,
        created: int | None = None,
        plugins: FrontEndPlugins | None = None,
        expose: Callable[[], Awaitable[bytes]] | None = None,
        responses: Responses | None = None,
        sound: SoundPool | None = None,
    ) -> None:
        """`created`: Unix time, by default now. `expose` collects the metrics of all processes, if
        the server has several, and `responses` are those of all. `sound` decodes files; None if no
        model hears. Raises ConfigError if two models have the same name."""
        self.config, self.models = config, models
        self.created = int(time.time()) if created is None else created
        self.plugins = plugins or FrontEndPlugins()
        self.limits = QueueLimits(config.max_queue, config.max_queue_tokens)
        self.templates = TemplatePool()
        self.responses = responses or ResponseStore(config.response_store)
        self.background = BackgroundWork()
        self.sound = sound
        self.exposition = SharedReading(expose or self._expose)
        """Metrics of all processes in Prometheus' text format."""
        names = [name for model in models for name in model.names]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"Two models are called {twice!r}.", param="served_model_name")

    @property
    def metrics(self) -> Metrics:
        """Metrics of the first model, in whose registry those of all are."""
        return self.models[0].engine.metrics

    async def _expose(self) -> bytes:
        return self.metrics.expose()

    def find(self, name: str | None) -> Target:
        """Return the model or adapter of this name. It may be left out if there is one model.

        Raises ModelNotFoundError for an unknown name, InvalidRequestError for a missing one."""
        if not name:
            if len(self.models) > 1:
                raise InvalidRequestError(
                    f"model is missing. Served: {self.describe_names()}.", param="model"
                )
            return Target(self, self.models[0])
        for model in self.models:
            if model.has_name(name):
                return Target(self, model)
        for model in self.models:
            adapter = model.engine.adapters.find(name)
            if adapter is not None:
                return Target(self, model, adapter)
        reasons = (model.engine.adapters.explain_missing(name) for model in self.models)
        raise ModelNotFoundError(
            next(filter(None, reasons), None)
            or f"The model {name!r} is not served here. Served: {self.describe_names()}.",
            param="model",
            code="model_not_found",
        )

    def describe_names(self) -> str:
        """Return the names that requests can use, for a message."""
        return ", ".join(one.engine.adapters.describe_names(*one.names) for one in self.models)

    async def check(self) -> None:
        """Return if all models are healthy. Raises like `AsyncLLM.check`."""
        await asyncio.gather(*(model.engine.check() for model in self.models))

    async def check_some(self) -> None:
        """Return if each model has a healthy core. Raises like `AsyncLLM.check_some`."""
        await asyncio.gather(*(model.engine.check_some() for model in self.models))

    async def live_requests(self) -> RequestList:
        """Return the live requests of all models. Raises ServerUnavailableError."""
        return await self._merged([model.engine.live_requests() for model in self.models])

    async def end_requests(self, id: str) -> RequestList:
        """End the requests with this id, of any model. Raises ServerUnavailableError."""
        return await self._merged([model.engine.end_requests(id) for model in self.models])

    async def _merged(self, asked: Sequence[Awaitable[RequestList]]) -> RequestList:
        """Name the model of each request, and put the oldest first.

        Models that do not answer are ignored if another has requests."""
        results = await asyncio.gather(*asked, return_exceptions=True)
        lists, failures = [], []
        for model, found in zip(self.models, results, strict=True):
            if isinstance(found, BaseException):
                failures.append(found)
                continue
            lists.append(found)
            for one in found.requests:
                one.model = model.name
        requests = [one for found in lists for one in found.requests]
        if failures and not requests:
            raise failures[0]
        usage = sum(found.kv_cache_usage for found in lists) / len(lists)
        return RequestList(0, sorted(requests, key=lambda one: -one.age), usage)


def server_of(request: Request) -> Server:
    server: Server = request.app.state.server
    return server


def target_of(request: Request, body: RequestBody) -> Target:
    """Return what a request names as its model.

    Raises the errors of `Server.find`, and InvalidRequestError for an unknown field if the server
    is strict."""
    server = server_of(request)
    check_fields(request, body, strict=server.config.strict)
    target = server.find(getattr(body, "model", None))
    request.state.param_names = body.param_names  # for errors of the engine, in `error_response`
    if (record := current_stats.get()) is not None:
        record.model = target.name
    return target
