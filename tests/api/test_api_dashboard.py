"""Metrics of the machine and the server, the Grafana dashboard, and traces."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client import CollectorRegistry, generate_latest

from tests.server import Server, until
from toolkit.api.http.layers.tracing import Tracer
from toolkit.engine.front.request_stats import RequestStats
from toolkit.metrics import machine
from toolkit.metrics.machine import GPUMetrics

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana.json"
COMPLETIONS = "/v1/completions"


class FakeNVML:
    """A driver with one device, which does not report its temperature."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    def __getattr__(self, name: str) -> Callable[..., object]:
        if name == "nvmlDeviceGetTemperature":
            raise self.NVMLError
        values = {
            "nvmlDeviceGetPowerUsage": 250_000,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetName": "H200",
            "nvmlDeviceGetCount": 1,
        }
        reading = type("Reading", (), {"used": 3, "total": 4, "gpu": 50})
        return lambda *_: values.get(name, reading)


@pytest.fixture
def gpu_text(monkeypatch: pytest.MonkeyPatch) -> str:
    """Metrics of the fake GPU, as a server would expose them."""
    monkeypatch.setitem(__import__("sys").modules, "pynvml", FakeNVML())
    registry = CollectorRegistry()
    registry.register(GPUMetrics("tk"))
    return generate_latest(registry).decode()


def test_gpu_metrics_are_nvml_s_values_in_base_units(gpu_text: str) -> None:
    for line in (
        'gpu_memory_used_bytes{gpu="0",gpu_name="H200"} 3.0',
        "gpu_power_watts{",
        "gpu_utilization_perc{",
    ):
        assert f"tk:{line}" in gpu_text
    assert re.search(r"gpu_power_watts{.*} 250.0", gpu_text)
    assert re.search(r"gpu_power_limit_watts{.*} 700.0", gpu_text)
    assert re.search(r"gpu_utilization_perc{.*} 0.5", gpu_text)
    assert "gpu_temperature_celsius{" not in gpu_text


def test_without_a_driver_there_are_no_gpu_metrics() -> None:
    assert machine._find_gpus() == (None, [])


def test_the_dashboard_queries_only_existing_metrics(server: Server, gpu_text: str) -> None:
    bodies = [
        {"prompt": "x", "max_tokens": 3, "ignore_eos": True},
        {"prompt": "x", "n": 0},
    ]
    for body in bodies:
        server.http.post(COMPLETIONS, json=body)
    text = server.http.get("/metrics").text + gpu_text
    exposed = set(re.findall(r"^([a-z0-9_:]+)[{ ]", text, re.MULTILINE)) | set(
        re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    )
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"(?:tk:|http_)[a-z0-9_]+", query)}
    assert len(asked) > 20
    assert not asked - exposed
    for query in queries:
        assert query.count("(") == query.count(")")


def test_versions_and_settings_are_exposed(server: Server) -> None:
    text = server.http.get("/metrics").text
    assert re.search(r'tk:build_info{.*device="cpu".*} 1.0', text)
    assert re.search(r'tk:cache_config_info{.*num_gpu_blocks="4096".*} 1.0', text)
    assert re.search(r'tk:config_info{.*max_num_seqs="256".*} 1.0', text)


def test_errors_are_counted_by_their_status(server: Server) -> None:
    before = (
        server.metric("tk:errors_total", code="400"),
        server.metric("tk:errors_total", code="404"),
    )
    server.http.post(COMPLETIONS, json={"prompt": "x", "n": 0})
    server.http.get("/nowhere")
    # Each is counted after its response was sent.
    until(lambda: server.metric("tk:errors_total", code="400") == before[0] + 1)
    until(lambda: server.metric("tk:errors_total", code="404") == before[1] + 1)


def test_prompt_tokens_are_counted_by_source(server: Server) -> None:
    def counted(source: str) -> float:
        return server.metric("tk:prompt_tokens_by_source_total", source=source)

    before = counted("local_compute"), counted("local_cache_hit")
    prompt = "Computed once, and found the second time. " * 3
    for _ in range(2):
        server.http.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 1})
    computed, found = counted("local_compute") - before[0], counted("local_cache_hit") - before[1]
    assert computed + found == 2 * len(prompt)
    assert found >= len(prompt) - 32


# ---- traces


def test_each_request_is_a_span_of_its_caller_s_trace(start_local: Callable[..., Server]) -> None:
    received: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    collector = HTTPServer(("127.0.0.1", 0), Collector)
    Thread(target=collector.serve_forever, args=[0.01], daemon=True).start()
    try:
        endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        server = start_local("--otlp-traces-endpoint", endpoint, OTEL_BSP_SCHEDULE_DELAY="100")
        trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
        headers = {"traceparent": f"00-{trace}-{parent}-01", "X-Request-Id": "order-9"}
        body = {"prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True}
        server.http.post(COMPLETIONS, json=body, headers=headers)
        until(lambda: received)
    finally:
        collector.shutdown()
    message = ExportTraceServiceRequest()
    message.ParseFromString(received[0])
    [span] = message.resource_spans[0].scope_spans[0].spans
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (trace, parent)
    attributes = {a.key: a.value for a in span.attributes}
    assert attributes["gen_ai.usage.input_tokens"].int_value == 3
    assert attributes["gen_ai.usage.output_tokens"].int_value == 5
    assert attributes["gen_ai.request.id"].string_value == "order-9"
    seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    assert 0 < attributes["gen_ai.latency.time_to_first_token"].double_value < seconds


def test_a_silent_collector_does_not_delay_shutdown() -> None:
    """The exporter itself makes several attempts, of ten seconds each."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracer = Tracer(f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces")
        tracer.export(RequestStats(0.0), {}, "order-10", COMPLETIONS, 200, 1.0)
        begun = time.monotonic()
        tracer.close()
    assert time.monotonic() - begun < 9.0
