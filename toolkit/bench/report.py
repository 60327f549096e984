"""A result for people (a table) and for programs (JSON)."""

from __future__ import annotations

import dataclasses
import datetime
import math
from typing import TYPE_CHECKING, Any

from toolkit.bench.stats import Result, Summary
from toolkit.config.clients import BenchConfig

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = "tk-bench/1"  # a new number when a key changes its meaning or goes


def as_json(config: BenchConfig, model: str, result: Result, *, interrupted: bool) -> dict[str, Any]:
    """The result, with seconds under keys that end in _s. Numbers that there are none of are null."""
    from toolkit import __version__

    return {
        "schema": SCHEMA,
        "tk_version": __version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "server": {"url": config.url, "model": model, "endpoint": config.endpoint},
        "load": {
            "request_rate": config.request_rate if config.paced else None,
            "max_concurrency": config.max_concurrency,
            "num_prompts": config.count,
            "duration_s": config.duration,
            "random_input_len": config.random_input_len,
            "random_output_len": config.random_output_len,
            "random_range_ratio": config.random_range_ratio,
            "random_vocab_size": config.random_vocab_size,
            "ignore_eos": config.ignore_eos,
            "num_warmups": config.num_warmups,
            "seed": config.seed,
        },
        "interrupted": interrupted,
        "wall_s": result.wall,
        "requests": {
            "sent": result.num_sent,
            "succeeded": result.num_succeeded,
            "failed": result.num_failed,
            "unfinished": result.num_unfinished,
            "max_in_flight": result.max_in_flight,
            "sent_per_s": result.send_rate,
        },
        "tokens": {
            "prompt": result.prompt_tokens,
            "output": result.output_tokens,
            "output_asked": result.output_tokens_asked,
        },
        "throughput": {
            "requests_per_s": result.per_second(result.num_succeeded),
            "output_tokens_per_s": result.per_second(result.output_tokens),
            "prompt_tokens_per_s": result.per_second(result.prompt_tokens),
        },
        "ttft_s": _summary(result.ttft),
        "ttft_from_send_s": _summary(result.ttft_from_send),
        "tpot_s": _summary(result.tpot),
        "itl_s": _summary(result.itl),
        "itl_per": "token" if result.itl_per_token else "chunk",
        "e2e_s": _summary(result.e2e),
        "e2e_from_send_s": _summary(result.e2e_from_send),
        "client": {
            "saturated": result.saturated,
            "processes": result.num_clients,
            "cpu_share": result.cpu_share,
            "send_lag_s": _summary(result.send_lag),
            "place_wait_s": _summary(result.place_wait) if config.max_concurrency is not None else None,
            "loop_delay_s": _summary(result.loop_delay),
        },
        "errors": [dataclasses.asdict(group) for group in result.errors],
    }


def _summary(summary: Summary | None) -> dict[str, float] | None:
    return None if summary is None else dataclasses.asdict(summary)


def print_table(
    console: Console, config: BenchConfig, model: str, result: Result, *, interrupted: bool
) -> None:
    """The result on one screen of 80 columns."""
    from rich.table import Table
    from rich.text import Text

    def say(name: str, text: str) -> None:
        console.print(Text.assemble((f"{name:<13}", "bold"), text), soft_wrap=True)

    say("server", f"{config.url}  {model}  {config.endpoint}")
    say("load", describe_load(config))
    say("lengths", describe_lengths(config))
    say(
        "requests",
        f"{result.num_succeeded:,} succeeded, {result.num_failed:,} failed"
        + (f", {result.num_unfinished:,} unfinished" if result.num_unfinished else "")
        + f" in {result.wall:,.2f} s",
    )
    rate = f"{result.send_rate:,.2f} requests/s, " if config.paced and result.send_rate is not None else ""
    say("sent", f"{rate}at most {result.max_in_flight:,} at once")
    say(
        "throughput",
        f"{result.per_second(result.num_succeeded):,.2f} requests/s   "
        f"{result.per_second(result.output_tokens):,.0f} output tok/s   "
        f"{result.per_second(result.prompt_tokens):,.0f} prompt tok/s",
    )
    say("tokens", f"{result.output_tokens:,} output, {result.prompt_tokens:,} prompt")
    say("client", describe_client(config, result))
    if config.paced and config.max_concurrency is not None and (wait := result.place_wait) is not None:
        say("", f"waited {_ms(wait.p50)} (p50), {_ms(wait.p99)} (p99) for a place")

    rows = [
        ("TTFT", result.ttft),
        ("  from send", result.ttft_from_send),
        ("TPOT", result.tpot),
        ("ITL" if result.itl_per_token else "ITL per chunk", result.itl),
        ("E2E", result.e2e),
        ("  from send", result.e2e_from_send),
    ]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    table.add_column("latency, ms", style="bold", min_width=13)
    for column in ("mean", "p50", "p90", "p99", "max"):
        table.add_column(column, justify="right", min_width=9)
    for name, summary in rows:
        table.add_row(name, *_milliseconds(summary))
    if result.num_succeeded:
        console.print()
        console.print(table)

    notes = list(describe_problems(config, result, interrupted=interrupted))
    if notes:
        console.print()
    for style, note in notes:
        console.print(Text(note, style=style), soft_wrap=True)


def describe_load(config: BenchConfig) -> str:
    """The load in words."""
    if config.paced:
        text = f"{config.request_rate:g} requests/s, Poisson arrivals"
    elif config.max_concurrency is not None:
        text = f"{config.max_concurrency:,} requests at a time"
    else:
        text = "all at once"
    if config.paced and config.max_concurrency is not None:
        text += f", at most {config.max_concurrency:,} at a time"
    if config.count is not None:
        text += f", {config.count:,} requests"
    if config.duration is not None:
        text += f", for {config.duration:g} s"
    return text


def describe_lengths(config: BenchConfig) -> str:
    """What each request carries and asks for."""
    spread = f", each ±{config.random_range_ratio:.0%}" if config.random_range_ratio else ""
    unit = "words" if config.endpoint == "chat" else "tokens"
    return f"{config.random_input_len:,} {unit} in, {config.random_output_len:,} tokens out{spread}"


def describe_client(config: BenchConfig, result: Result) -> str:
    """How the client itself fared."""
    text = f"{result.cpu_share:.0%} of a core"
    if result.num_clients > 1:
        text = f"{result.num_clients} processes, the busiest used {text}"
    if config.paced and result.send_lag is not None:
        text += f"; sent {_ms(result.send_lag.p50)} late (p50), {_ms(result.send_lag.p99)} (p99)"
    return text


def describe_problems(config: BenchConfig, result: Result, *, interrupted: bool) -> list[tuple[str, str]]:
    """(style, sentence) for everything that the reader must know before believing the numbers."""
    notes = []
    if interrupted:
        notes.append(("yellow", f"Interrupted; {result.num_unfinished:,} requests had not ended."))
    notes += [("red", f"{group.count:,} x {group.cause}: {group.example}") for group in result.errors]
    if config.ignore_eos and result.output_tokens < result.output_tokens_asked:
        notes.append(
            (
                "yellow",
                f"The answers were shorter than asked: {result.output_tokens:,} of "
                f"{result.output_tokens_asked:,} tokens.",
            )
        )
    if not result.itl_per_token:
        notes.append(
            (
                "yellow",
                "The server does not say how many tokens a chunk carries: ITL is the time between chunks.",
            )
        )
    if result.saturated is not None:
        notes.append(
            (
                "bold red",
                f"CLIENT SATURATED: {result.saturated}.\nThe numbers are the client's, not the server's.",
            )
        )
    return notes


def _milliseconds(summary: Summary | None) -> list[str]:
    if summary is None:
        return ["-"] * 5
    return [f"{x * 1e3:,.2f}" for x in (summary.mean, summary.p50, summary.p90, summary.p99, summary.max)]


def _ms(seconds: float) -> str:
    digits = 0 if seconds >= 0.1 or math.isclose(seconds, 0.0) else 2
    return f"{seconds * 1e3:,.{digits}f} ms"
