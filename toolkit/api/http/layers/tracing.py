"""OpenTelemetry traces: one span per request."""

import threading
import time
from collections.abc import Mapping

from toolkit.engine.front.request_stats import RequestStats
from toolkit.errors import ConfigError
from toolkit.version import __version__

FLUSH_TIMEOUT = 1.0  # seconds to send the last spans


class Tracer:
    """Sends spans in the background. A span's parent is the one in the request's `traceparent`.

    Attributes have the names of OpenTelemetry's conventions for generative AI."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint`: URL for OTLP over HTTP. Raises ConfigError if OpenTelemetry is missing."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise ConfigError(
                "--otlp-traces-endpoint needs OpenTelemetry: pip install '.[otlp]' in tk's "
                "checkout.",
                param="otlp_traces_endpoint",
            ) from None
        self._context = TraceContextTextMapPropagator()
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "tk", "service.version": __version__}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("tk", __version__)

    def export(
        self,
        record: RequestStats,
        headers: Mapping[bytes, bytes],
        request_id: str,
        path: str,
        status: int,
        seconds: float,
    ) -> None:
        """Queue the span of an answered request."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        carrier = {
            name: headers[name.encode()].decode("latin-1")
            for name in ("traceparent", "tracestate")
            if name.encode() in headers
        }
        ended = time.time_ns()
        span = self._tracer.start_span(
            f"POST {path}",
            context=self._context.extract(carrier),
            kind=SpanKind.SERVER,
            start_time=ended - int(seconds * 1e9),
            attributes={
                "http.request.method": "POST",
                "url.path": path,
                "http.response.status_code": status,
                "gen_ai.request.model": record.model,
                "gen_ai.request.id": request_id,
                "gen_ai.usage.input_tokens": record.num_prompt_tokens,
                "gen_ai.usage.output_tokens": record.num_output_tokens,
            },
        )
        if record.time_to_first_token is not None:
            span.set_attribute("gen_ai.latency.time_to_first_token", record.time_to_first_token)
        span.set_attribute("gen_ai.latency.e2e", seconds)
        if status >= 500 or record.error is not None:
            span.set_status(Status(StatusCode.ERROR))
        span.end(ended)

    def close(self) -> None:
        """Send queued spans for at most FLUSH_TIMEOUT."""
        # The exporter retries for longer and has no limit to set: a daemon thread is left behind.
        sending = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        sending.start()
        sending.join(FLUSH_TIMEOUT)
