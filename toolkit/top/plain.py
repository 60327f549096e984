"""The snapshot for pipes: one fact a line."""

from __future__ import annotations

from toolkit.top import words
from toolkit.top.history import View
from toolkit.top.source import Identity


def snapshot(url: str, identity: Identity, view: View) -> str:
    """The view as text that ends in a newline."""
    facts = {
        "generation": words.per_second(view.generation_rate, "tok"),
        "prompt": words.per_second(view.prompt_rate, "tok"),
        "running": words.count(view.running),
        "waiting": words.count(view.waiting),
        "finished": words.reasons(view.finished),
        "preemptions": words.count(view.preemptions),
        "kv cache": words.percent(view.kv_usage),
        "prefix hits": words.percent(view.prefix_hit_rate),
    }
    lines = [words.heading(url, identity, view)]
    lines += [f"{name:<12}{fact}" for name, fact in facts.items()]
    titles = ("p50", "p90", "p99", "mean", "count")
    lines.append(
        f"{'latency':<12}" + "".join(f"{title:>12}" for title in titles) + f"   {words.span(view.span)}"
    )
    for name, latency in view.latencies.items():
        values = [words.seconds(value) for value in (latency.p50, latency.p90, latency.p99, latency.mean)]
        lines.append(f"{name:<12}" + "".join(f"{cell:>12}" for cell in [*values, words.count(latency.count)]))
    return "\n".join(lines) + "\n"
