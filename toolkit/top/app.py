"""The screen of `tk top`."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import Footer, Sparkline, Static

from toolkit.bench.wire import ServerError
from toolkit.top import words
from toolkit.top.history import History, View
from toolkit.top.source import Identity, Source

FACT = 12  # columns of a fact's name


class TopApp(App[None]):
    """Reads the source every `interval` seconds and shows the last `window` seconds."""

    CSS = """
    Screen { layout: vertical; }
    Static { text-wrap: nowrap; text-overflow: ellipsis; }
    #title { height: 1; padding: 0 1; text-style: bold; }
    #status { height: 1; padding: 0 1; color: $text-muted; }
    #status.lost { color: $text-error; text-style: bold; }
    #panels.lost { opacity: 50%; }
    .panel { border: round $primary; border-title-style: bold; padding: 0 1; }
    #throughput { height: 1fr; min-height: 6; }
    .rate { height: 1fr; }
    .rate Static { width: 18; }
    .rate Sparkline { width: 1fr; height: 1fr; }
    #prompt-line > .sparkline--max-color { color: $secondary; }
    #prompt-line > .sparkline--min-color { color: $secondary-darken-2; }
    #middle { height: 6; }
    #requests, #cache { width: 1fr; height: 6; }
    #latency { height: 7; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [("q", "quit", "Quit"), ("p", "pause", "Pause")]
    ENABLE_COMMAND_PALETTE = False
    TITLE = "tk top"

    def __init__(self, source: Source, *, interval: float, window: float) -> None:
        super().__init__()
        self.source = source
        self.interval = interval
        self.history = History(window)
        self.identity: Identity | None = None
        self.paused = False

    def compose(self) -> ComposeResult:
        yield Static(f"tk top  {self.source.url}", id="title")
        yield Static("Connecting ...", id="status")
        with Vertical(id="panels"):
            with Vertical(id="throughput", classes="panel") as panel:
                panel.border_title = "Throughput"
                for name in ("generation", "prompt"):
                    with Horizontal(classes="rate"):
                        yield Static(id=f"{name}-rate")
                        yield Sparkline([], id=f"{name}-line")
            with Horizontal(id="middle"):
                yield panel_of("requests", "Requests")
                yield panel_of("cache", "KV cache")
            yield panel_of("latency", "Latency")
        yield Footer()

    def on_mount(self) -> None:
        self.show(View())
        self.run_worker(self.keep_looking(), exclusive=True)

    async def on_unmount(self) -> None:
        await self.source.close()

    async def keep_looking(self) -> None:
        """Reads and shows as long as the screen is there; a server that is gone is tried again each time."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self.interval
            if not self.paused:
                await self.look()
            await asyncio.sleep(max(0.0, due - loop.time()))

    async def look(self) -> None:
        """One reading, shown."""
        try:
            scrape = await self.source.scrape()
            if self.identity is None:
                self.identity = await self.source.identity()
        except ServerError as error:
            self.identity = None  # another may stand there when it comes back
            self.report(f"Trying again every {self.interval:g} s. {error.message}", lost=True)
            return
        self.history.add(scrape)
        self.show(self.history.view())
        if not self.paused:
            self.report(f"every {self.interval:g} s", lost=False)

    def action_pause(self) -> None:
        self.paused = not self.paused
        self.report("Paused; p goes on." if self.paused else "Going on ...", lost=False)

    def report(self, text: str, *, lost: bool) -> None:
        """The status line. `lost`: the numbers below it are old."""
        status = self.query_one("#status", Static)
        status.update(Text(text))
        status.set_class(lost, "lost")
        self.query_one("#panels").set_class(lost, "lost")

    def show(self, view: View) -> None:
        """Puts the numbers on the screen."""
        heading = words.heading(self.source.url, self.identity or Identity(), view)
        self.query_one("#title", Static).update(Text(heading))
        for name, value, history in (
            ("generation", view.generation_rate, view.generation_history),
            ("prompt", view.prompt_rate, view.prompt_history),
        ):
            line = self.query_one(f"#{name}-line", Sparkline)
            line.data = right_aligned(history, line.size.width)
            peak = f"\npeak {words.count(max(line.data))}" if history else ""
            self.query_one(f"#{name}-rate", Static).update(
                Text.assemble(f"{name}\n{words.per_second(value, 'tok')}", (peak, "dim"))
            )
        self.query_one("#requests", Static).update(
            facts(
                running=words.count(view.running),
                waiting=words.count(view.waiting),
                finished=words.per_second(view.finished_rate, "req"),
                reasons=words.reasons(view.finished),
            )
        )
        cache = self.query_one("#cache", Static)
        usage = bar(view.kv_usage, cache.content_size.width - FACT - 8)
        cache.update(
            facts(
                used=f"{usage} {words.percent(view.kv_usage)}",
                prefix_hits=f"{words.percent(view.prefix_hit_rate)}  {words.span(view.span or 0.0)}",
                preemptions=words.count(view.preemptions),
            )
        )
        panel = self.query_one("#latency", Static)
        panel.border_title = f"Latency, {words.span(view.span or 0.0)}"
        panel.update(latency_table(view))


def panel_of(name: str, title: str) -> Static:
    """A framed text."""
    panel = Static(id=name, classes="panel")
    panel.border_title = title
    return panel


def facts(**rows: str) -> Text:
    """One fact a line, cut where the panel ends."""
    lines = [
        Text.assemble((f"{name.replace('_', ' '):<{FACT}}", "dim"), value) for name, value in rows.items()
    ]
    return Text("\n").join(lines)


def bar(share: float | None, width: int) -> str:
    """A share from 0 to 1 as a bar of `width` columns."""
    filled = round(min(max(share or 0.0, 0.0), 1.0) * width)
    return "█" * filled + "░" * (width - filled)


def latency_table(view: View) -> Text:
    """Names down, quantiles across."""
    columns = ("p50", "p90", "p99", "mean", "count")
    text = Text()
    text.append(f"{'':<8}" + "".join(f"{column:>13}" for column in columns), "dim")
    for name, latency in view.latencies.items():
        cells = [words.seconds(value) for value in (latency.p50, latency.p90, latency.p99, latency.mean)]
        text.append(f"\n{name:<8}", "dim")
        text.append("".join(f"{cell:>13}" for cell in [*cells, words.count(latency.count)]))
    return text


def right_aligned(history: tuple[float, ...], width: int) -> list[float]:
    """One point a column, the newest at the right; the zero at the left makes the bars begin at nothing."""
    points = list(history[-(width - 1) :]) if width > 1 else []
    return [0.0] * (width - len(points)) + points
