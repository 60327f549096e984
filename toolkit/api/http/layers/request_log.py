"""The log line of each request."""

import logging

from toolkit.api.http.error_bodies import error_detail
from toolkit.engine.front.request_stats import RequestStats

logger = logging.getLogger(__name__)


def log_request(
    record: RequestStats, request_id: str, path: str, status: int, seconds: float
) -> None:
    """Log a request when it is answered, without its content.

    `status` is 499 if the client has disconnected."""
    if not logger.isEnabledFor(logging.INFO):
        return
    first, each = record.time_to_first_token, record.time_per_output_token
    fields = {
        "request_id": request_id,
        "client": record.origin,
        "model": record.model,
        "path": path,
        "status": status,
        "complete": record.is_complete,
        "error": None if record.error is None else error_detail(record.error).message,
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": record.num_cached_tokens,
        "output_tokens": record.num_output_tokens,
        "ttft_seconds": first and round(first, 6),
        "tpot_seconds": each and round(each, 6),
        "total_seconds": round(seconds, 6),
    }
    logger.info(
        "%s %s %s %d%s: %d + %d tokens, TTFT %s, TPOT %s, total %.3f s",
        request_id,
        record.model or "-",
        path,
        status,
        _not_finished(record),
        fields["prompt_tokens"],
        fields["output_tokens"],
        _milliseconds(first),
        _milliseconds(each),
        seconds,
        extra={"fields": fields},
    )


def _not_finished(record: RequestStats) -> str:
    if record.error is not None:
        return f" (not finished: {error_detail(record.error).message})"
    return "" if record.is_complete else " (not finished)"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"
