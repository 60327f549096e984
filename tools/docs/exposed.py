"""Endpoints and metrics of a server, read from the objects that implement them."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
from prometheus_client.registry import Collector

from toolkit.api.app import make_app
from toolkit.api.http.server import ServedModel, Server
from toolkit.config import EngineConfig, ServerConfig
from toolkit.metrics import HTTPMetrics, Metrics
from toolkit.metrics.machine import GPU_LABELS, GPU_READINGS
from toolkit.serving.front import LoadedModel, ModelFacts, ModelSetup
from toolkit.serving.stats_log import set_info_metrics
from toolkit.worker import WorkerInfo


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A path of the API, with its methods."""

    path: str
    methods: tuple[str, ...]
    summary: str


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric, under the name that queries use."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


def endpoints() -> list[Endpoint]:
    """Return all endpoints of `tk serve`, sorted by path, those under /v1 first."""
    engine: Any = SimpleNamespace(metrics=Metrics("tk", "model"))
    model = ServedModel(engine, ("model",))  # with all that the application reads
    gate: Any = make_app(Server(ServerConfig(), [model]))
    paths = gate.access_control.app.openapi()["paths"]  # the layer's inner app is FastAPI's
    found = [Endpoint(path, _methods(routes), _summary(routes)) for path, routes in paths.items()]
    found += [Endpoint(path, ("GET",), text) for path, text in _FASTAPI.items()]
    return sorted(found, key=lambda one: (not one.path.startswith("/v1/"), one.path))


def _methods(routes: dict[str, Any]) -> tuple[str, ...]:
    return tuple(sorted(method.upper() for method in routes))


def _summary(routes: dict[str, Any]) -> str:
    """Return the first paragraph of a route's description."""
    text: str = next(iter(routes.values())).get("description", "")
    return " ".join(text.split("\n\n")[0].split())


def metrics() -> list[Metric]:
    """Return all metrics of a server with a GPU, sorted by name."""
    exposed = Metrics("tk", "model")
    HTTPMetrics(exposed.registry)
    required = [field for field in msgspec.structs.fields(WorkerInfo) if field.required]
    info = WorkerInfo(**{field.name: field.type() for field in required})
    facts = ModelFacts(has_tokenizer=True, has_chat_template=True, sampling={})
    model = LoadedModel(ModelSetup(EngineConfig(), ("model",)), [info], facts)
    set_info_metrics(SimpleNamespace(metrics=exposed), [model])
    found = [
        _metric(family, collector)
        for collector in exposed.registry._collector_to_names  # the public API hides unused labels
        for family in collector.collect()
    ]
    found += [
        Metric(f"tk:{name}", "gauge", GPU_LABELS, text) for name, (text, _) in GPU_READINGS.items()
    ]
    return sorted(found, key=lambda metric: metric.name)


def _metric(family: Any, collector: Collector) -> Metric:
    labels = getattr(collector, "_labelnames", ()) or getattr(family, "_labelnames", ())
    name = f"{family.name}_total" if family.type == "counter" else family.name
    return Metric(name, family.type, tuple(labels), family.documentation)


_FASTAPI = {
    "/openapi.json": "The API as an OpenAPI document.",
    "/docs": "The API's documentation, interactive.",
    "/redoc": "The API's documentation in ReDoc's layout.",
}
"""Endpoints that FastAPI adds."""
