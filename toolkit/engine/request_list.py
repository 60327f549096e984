"""Descriptions of live requests for monitoring.

A core lists and ends the requests of all its clients, between two steps, so that any API worker can
answer for the server."""

import re
from collections.abc import Iterable

from toolkit.engine.messages import RequestInfo
from toolkit.scheduler import Request, RequestStatus

_SUFFIX = re.compile(r"-[0-9a-f]{8}(-\d+)*")
"""Suffix that the server appends to an answer's id to make it unique."""


def describe(requests: Iterable[Request], now: float) -> list[RequestInfo]:
    """Return one entry for each request. `now`: on the monotonic clock."""
    found: dict[tuple[int, str], RequestInfo] = {}
    for request in requests:
        if request.client < 0:  # the engine's own
            continue
        key = (request.client, request.name)
        if key not in found:
            found[key] = RequestInfo(
                id=request.name,
                state=RequestStatus.WAITING.value,
                age=now - request.arrived_at,
                num_prompt_tokens=request.num_prompt_tokens,
                num_cached_tokens=request.num_cached_tokens,
                num_output_tokens=0,
                tokens_per_second=0.0,
                num_blocks=0,
                num_preemptions=0,
                priority=request.spec.priority,
                origin=request.origin,
                n=0,
                adapter="" if request.spec.adapter is None else request.spec.adapter.name,
            )
        info = found[key]
        info.n += 1
        if info.state != "running":
            info.state = request.status.value
        num_output = request.num_known_tokens - request.num_prompt_tokens
        info.num_output_tokens += num_output
        if request.first_run_at:
            info.tokens_per_second += num_output / max(now - request.first_run_at, 1e-3)
        info.num_blocks += request.num_blocks
        info.num_preemptions += request.num_preemptions
    return list(found.values())


def has_id(request: Request, id: str) -> bool:
    """Return True if `id` is the request's own id or that of its answer."""
    name = request.name
    return name == id or (name.startswith(id) and _SUFFIX.fullmatch(name, len(id)) is not None)
