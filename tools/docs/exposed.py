"""What a server offers: its endpoints and its metrics, asked of the objects that it is made of."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
from prometheus_client.registry import Collector

from toolkit.api.app import make_app
from toolkit.config import EngineConfig, ServerConfig
from toolkit.metrics import HTTPMetrics, Metrics
from toolkit.metrics.machine import GPU_LABELS, GPU_READINGS
from toolkit.serving.front import Served
from toolkit.serving.stats_log import describe
from toolkit.worker import WorkerInfo


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A path of the API."""

    path: str
    methods: tuple[str, ...]
    summary: str


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric, by the name that queries use."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


def endpoints() -> list[Endpoint]:
    """Every endpoint of `tk serve`, by path; those under /v1 first."""
    engine = SimpleNamespace(metrics=Metrics("tk", "model"))
    gate: Any = make_app(SimpleNamespace(config=ServerConfig(), engine=engine))  # type: ignore[arg-type]  # all it reads
    paths = gate.door.app.openapi()["paths"]  # FastAPI's application, behind gate and door
    found = [Endpoint(path, _methods(routes), _summary(routes)) for path, routes in paths.items()]
    found += [Endpoint(path, ("GET",), text) for path, text in _FASTAPI.items()]
    return sorted(found, key=lambda one: (not one.path.startswith("/v1/"), one.path))


def _methods(routes: dict[str, Any]) -> tuple[str, ...]:
    return tuple(sorted(method.upper() for method in routes))


def _summary(routes: dict[str, Any]) -> str:
    """The first paragraph of what a route says of itself."""
    text: str = next(iter(routes.values())).get("description", "")
    return " ".join(text.split("\n\n")[0].split())


def metrics() -> list[Metric]:
    """Every metric of a server with a GPU, by name."""
    told = Metrics("tk", "model")
    HTTPMetrics(told.registry)
    required = [field for field in msgspec.structs.fields(WorkerInfo) if field.required]
    info = WorkerInfo(**{field.name: field.type() for field in required})
    describe(SimpleNamespace(metrics=told), EngineConfig(), Served([info], True, True))
    found = [
        _metric(family, collector)
        for collector in told.registry._collector_to_names  # the public way shows no labels of what is not counted yet
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
    "/docs": "The same to read, and to try in a browser.",
    "/redoc": "The same to read, otherwise laid out.",
}
"""What FastAPI serves by itself."""
