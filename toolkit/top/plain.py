"""Snapshots for pipes and scripts: one fact per line, or JSON."""

import time
from dataclasses import asdict
from typing import Any

import msgspec

from toolkit.logs import escape_json, escape_line
from toolkit.top import wording
from toolkit.top.diagnosis import diagnose
from toolkit.top.readings.server import Server
from toolkit.top.state import State
from toolkit.top.view import View, view_of

SCHEMA = 1
NAME = 12  # columns of a name
COLUMN = 11  # columns of a number


def snapshot(state: State) -> str:
    """Return the servers as text, with latencies and hit rate since each server's start."""
    return "\n\n".join(_text(server) for server in state.servers)


def as_json(state: State) -> str:
    """Return the servers as JSON, and as `total` all together.

    Times are in seconds, rates per second, sizes in bytes, shares from 0 to 1. Numbers that a
    server does not report are null."""
    content = {
        "schema": SCHEMA,
        "time": time.time(),
        "servers": [_content(server) for server in state.servers],
        "total": _numbers(view_of(state.servers, since_start=True)),
    }
    return escape_json(msgspec.json.format(msgspec.json.encode(content), indent=2).decode())


def _content(server: Server) -> dict[str, Any]:
    view = view_of([server], since_start=True)
    return {
        "url": server.url,
        "up": server.is_up,
        "error": server.error or None,
        **_numbers(view),
        "why_slow": asdict(diagnose(server)),
        "requests": None
        if server.requests is None
        else [msgspec.to_builtins(one) for one in server.requests],
    }


def _numbers(view: View) -> dict[str, Any]:
    return {
        name: value
        for name, value in asdict(view).items()
        if name not in ("points", "ages", "span")
    }


def _text(server: Server) -> str:
    if server.last is None:
        return f"{server.url}\n{escape_line(server.error)}"
    view = view_of([server], since_start=True)
    up = (
        f"up {wording.duration(server.last.wall - view.start_time)}"
        if view.start_time is not None
        else ""
    )
    version = f"version {view.version}" if view.version else ""
    heading = "  ".join(
        part for part in (view.model or "unknown model", version, server.url, up) if part
    )
    found = diagnose(server)
    facts = {
        "generation": wording.per_second(view.generation_rate, "tok"),
        "prompt": wording.per_second(view.prompt_rate, "tok"),
        "running": wording.count(view.running),
        "waiting": wording.count(view.waiting),
        "finished": wording.reasons(view.finished),
        "batch": wording.decimal(view.batch_size),
        "kv cache": wording.percent(view.kv_usage),
        "prefix hits": wording.percent(view.prefix_hit_rate),
        **(
            {"drafts": drafts}
            if (drafts := wording.drafts(view.draft_acceptance, view.acceptance_by_position))
            else {}
        ),
        **_features(view),
        "preemptions": wording.count(view.preemptions),
        **_gpu(view),
        "why slow": f"{found.kind}: {found.text}",
    }
    if found.advice:
        facts["try"] = found.advice
    lines = [heading, *(f"{name:<{NAME}}{fact}" for name, fact in facts.items())]
    titles = ("p50", "p90", "p99", "mean", "count")
    lines.append(f"{'since start':<{NAME}}" + "".join(f"{title:>{COLUMN}}" for title in titles))
    for name, latency in view.latencies.items():
        values = [
            wording.seconds(value)
            for value in (latency.p50, latency.p90, latency.p99, latency.mean)
        ]
        cells = [*values, wording.count(latency.count)]
        lines.append(f"{name:<{NAME}}" + "".join(f"{cell:>{COLUMN}}" for cell in cells))
    if server.error:
        lines.append(server.error)
    return "\n".join(map(escape_line, lines))


def _features(view: View) -> dict[str, str]:
    """Return a line about sound or pictures, if there were any."""
    if view.audio_seconds:
        rate, total = wording.decimal(view.audio_rate), wording.count(view.audio_seconds)
        return {"sound": f"{total} s, {rate} times real time"}
    return {"pictures": _pictures(view)} if view.pictures else {}


def _pictures(view: View) -> str:
    rate = wording.decimal(view.picture_rate)
    return (
        f"{wording.count(view.pictures)}, {rate} per second, "
        f"{wording.percent(view.picture_hit_rate)} shared"
    )


def _gpu(view: View) -> dict[str, str]:
    if view.gpu_power is None and view.gpu_utilization is None:
        return {}
    memory = f"{wording.size(view.gpu_memory_used)} of {wording.size(view.gpu_memory_total)}"
    efficiency = f"{wording.decimal(view.tokens_per_joule)} tokens per joule"
    power = f"{wording.count(view.gpu_power)} W, {efficiency}"
    return {"gpu": f"{wording.percent(view.gpu_utilization, 0)} busy, {memory}, {power}"}
