"""The readings of the last while, and what the screen shows of them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from toolkit.top.arithmetic import Latency, increase, latency, rate, restarted, share
from toolkit.top.scrape import Scrape

HISTORY = 1000  # points of a sparkline: wider than any terminal

LATENCIES = {
    "TTFT": "time_to_first_token_seconds",
    "ITL": "inter_token_latency_seconds",
    "E2E": "e2e_request_latency_seconds",
    "queue": "request_queue_time_seconds",
}


@dataclass(frozen=True, slots=True)
class View:
    """Every number on the screen. None: the server does not say, or there is nothing to say yet."""

    model: str | None = None
    start_time: float | None = None  # seconds since 1970
    prompt_rate: float | None = None  # tokens per second
    generation_rate: float | None = None
    prompt_history: tuple[float, ...] = ()
    generation_history: tuple[float, ...] = ()
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None  # 0 to 1
    prefix_hit_rate: float | None = None  # 0 to 1, over the window
    preemptions: float | None = None  # since the server's start
    finished: dict[str, float] = field(default_factory=dict)  # by reason, since the server's start
    finished_rate: float | None = None  # requests per second
    latencies: dict[str, Latency] = field(default_factory=dict)  # over `span`
    span: float | None = None  # seconds; None: since the server's start


class History:
    """Takes readings and forgets those older than the window."""

    def __init__(self, window: float) -> None:
        self.window = window
        self.scrapes: deque[Scrape] = deque()
        self.prompt_rates: deque[float] = deque(maxlen=HISTORY)
        self.generation_rates: deque[float] = deque(maxlen=HISTORY)

    def add(self, scrape: Scrape) -> None:
        """Takes the newest reading. After a restart of the server those before it count no more."""
        if self.scrapes and restarted(self.scrapes[-1], scrape):
            self.scrapes.clear()
        self.scrapes.append(scrape)
        while len(self.scrapes) > 2 and self.scrapes[1].time <= scrape.time - self.window:
            self.scrapes.popleft()  # the one before the window stays while it is needed to span the window
        if len(self.scrapes) > 1:
            self.prompt_rates.append(self._rate("prompt_tokens_total") or 0.0)
            self.generation_rates.append(self._rate("generation_tokens_total") or 0.0)

    def _rate(self, name: str) -> float | None:
        return rate(name, self.scrapes[-2], self.scrapes[-1]) if len(self.scrapes) > 1 else None

    def view(self, *, since_start: bool = False) -> View:
        """What there is to show. `since_start`: latencies and hit rate over the server's life."""
        if not self.scrapes:
            return View()
        new = self.scrapes[-1]
        old = None if since_start else self.scrapes[0]
        finished = {
            reason: count
            for reason, count in new.by_label("request_success_total", "finished_reason").items()
            if count
        }
        return View(
            model=new.model,
            start_time=new.start_time,
            prompt_rate=self._rate("prompt_tokens_total"),
            generation_rate=self._rate("generation_tokens_total"),
            prompt_history=tuple(self.prompt_rates),
            generation_history=tuple(self.generation_rates),
            running=new.total("num_requests_running"),
            waiting=new.total("num_requests_waiting"),
            kv_usage=new.mean("kv_cache_usage_perc"),
            prefix_hit_rate=share("prefix_cache_hits_total", "prefix_cache_queries_total", old, new),
            preemptions=increase("num_preemptions_total", None, new),
            finished=finished,
            finished_rate=self._rate("request_success_total"),
            latencies={title: latency(name, old, new) for title, name in LATENCIES.items()},
            span=None if old is None else min(self.window, new.time - old.time),
        )
